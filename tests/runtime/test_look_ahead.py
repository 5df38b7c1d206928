"""Fetching ahead in a model that goes back and forth between two groups: the next layers are on their way all the same."""

import itertools

import pytest
import torch
from torch import nn

import unwall
from unwall.shards.group import Residence

WIDTH, LAYERS = 32, 20


class Adapted(nn.Module):
    """Three frozen linear layers with a trainable one of low rank beside each."""

    def __init__(self):
        super().__init__()
        self.base = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False).requires_grad_(False) for _ in range(3))
        self.down = nn.ModuleList(nn.Linear(WIDTH, 2, bias=False) for _ in range(3))
        self.up = nn.ModuleList(nn.Linear(2, WIDTH, bias=False) for _ in range(3))

    def forward(self, x):
        for base, down, up in zip(self.base, self.down, self.up, strict=True):
            x = base(x) + up(down(x))
        return x


def model_with_adapters():
    torch.manual_seed(0)
    return nn.Sequential(*(Adapted() for _ in range(LAYERS)))


def leads(model, step):
    """For each fetch of a step: how many uses before its own it began. And how many uses found their group absent."""
    executor = unwall.api.engine(model).executor
    began, found, absent = {}, [], []
    use, gather = executor.use, executor.agreement.gather

    def used(index):
        at = executor.trace.position
        if executor.groups[index].residence is Residence.ABSENT:
            absent.append(index)
        elif index in began:
            found.append(at - began.pop(index))
        use(index)

    def gathered(index, near):
        began[index] = executor.trace.position
        gather(index, near)

    executor.use, executor.agreement.gather = used, gathered
    try:
        step()
    finally:
        del executor.use
        executor.agreement.gather = gather
    return found, absent


def test_the_next_layers_are_fetched_while_one_is_used():
    model = model_with_adapters()
    layer_bytes = 3 * WIDTH * WIDTH * 4
    plan = unwall.Plan(
        compute_dtype=torch.float32,
        params="host",
        optimizer="host",
        device_bytes=9 * layer_bytes,
        activations="keep",
    )
    unwall.shard(model, plan)
    engine = unwall.api.engine(model)
    optimizer = unwall.AdamW([param for param in model.parameters() if param.requires_grad], lr=1e-2)
    batch = torch.randn(2, WIDTH)

    def step():
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(3):
        step()
    engine.finish()  # a group under update is not fetched ahead: what is fetched must not depend on the machine
    frozen = [group for group in engine.groups if not group.params[0].requires_grad]
    assert len(frozen) == LAYERS
    mismatches = unwall.stats(model).trace_mismatches
    found, absent = leads(model, step)
    assert len(found) >= LAYERS  # they do come and go
    assert sorted(found)[len(found) // 4] >= 6  # as many uses as a layer has in forward
    assert len(absent) <= 2
    assert unwall.stats(model).trace_mismatches == mismatches


def order_of_fetches():
    """A step of a model whose layers come from the host over two ranks: in which order copies from the host begin, all-gathers
    begin, and all-gathers are waited for. By group."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(8)))
    plan = unwall.Plan(compute_dtype=torch.float32, params="host", optimizer="host", device_bytes="160KiB")
    unwall.shard(model, plan)
    optimizer = unwall.AdamW(model.parameters())

    def step():
        model(torch.ones(2, 64)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(4):
        step()
    engine, events = unwall.api.engine(model), []
    links, ranks = engine.tiers.links, engine.ranks
    copy, all_gather = links.copy, ranks.all_gather
    of = {group.buffer.tensor.untyped_storage()._cdata: group.index for group in engine.groups}

    def copied(source, target, label, *args, **kwargs):
        if target.block.tier == "device":
            events.append(("copy", next(group.index for group in engine.groups if group.name == label)))
        return copy(source, target, label, *args, **kwargs)

    def gathered(whole, shard, *args):
        index = of[whole.untyped_storage()._cdata]
        events.append(("gather", index))
        found = all_gather(whole, shard, *args)
        wait = found.wait
        found.wait = lambda: (events.append(("waited", index)), wait())[1]
        return found

    links.copy, ranks.all_gather = copied, gathered
    model(torch.ones(2, 64))
    return events


def test_the_copy_of_the_next_group_begins_while_the_one_before_is_gathered(ranks):
    """With several ranks, too: an all-gather is not waited for before the copy of the next group from the host has begun."""
    for events in ranks(2).run(order_of_fetches):
        fetched = [index for kind, index in events if kind == "gather"]
        assert len(fetched) >= 5
        for index, following in itertools.pairwise(fetched[1:]):  # the first is waited for: a step came before
            begun, copied = events.index(("gather", index)), events.index(("copy", following))
            assert begun < copied < events.index(("waited", index)), events


@torch.no_grad()
@pytest.mark.parametrize("groups", [1, 2, 3])
def test_a_card_with_room_for_few_groups_is_enough(groups, monkeypatch):
    """What is fetched ahead does not drop, for want of memory, what was fetched ahead before, and so on. Nothing stays for good."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(12)))
    batch = torch.ones(2, 64)
    expected = model(batch)
    unwall.shard(model, unwall.Plan(compute_dtype=torch.float32, params="host", optimizer="host", device_bytes="128KiB"))
    executor, device = unwall.api.engine(model).executor, unwall.api.engine(model).tiers.device
    (nbytes,) = {group.fetch_bytes for group in executor.groups}
    take, begun = device._take, []

    def take_within(memory):
        begun.append(None)
        assert len(begun) < 1000
        if device.ledger.live_bytes > groups * nbytes:
            raise torch.OutOfMemoryError("on purpose")
        return take(memory)

    monkeypatch.setattr(device, "_take", take_within)
    for _ in range(5):
        assert torch.equal(model(batch), expected)
    executor.drop_cache()
    assert device.ledger.live_bytes <= nbytes  # the one that was used last, at most
