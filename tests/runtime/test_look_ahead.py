"""Fetching ahead in a model that goes back and forth between two groups: the next layers are on their way all the same."""

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
