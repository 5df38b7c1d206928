"""``Plan(grads="transient")``: each gradient is used during backward and not kept. The bits are those of kept gradients."""

import re
import threading

import pytest
import torch
from busy import until
from early_tools import DEVICE, HOST, backward, build, on_disk, outcome
from torch import nn
from torch.utils.checkpoint import checkpoint

import unwall
from unwall.optim.updates import HostUpdate, drain
from unwall.plans import Plan, PlanError
from unwall.runtime.failures import FailureDomain
from unwall.tiers.ledger import BudgetError

WIDTH = 64
NUMEL = 124_928
"""Of the model, with what pads its groups."""


def start(plan, **options):
    model = build()
    unwall.shard(model, Plan(**plan))
    return model, unwall.AdamW(model.parameters(), lr=1e-2, update_in_backward=True, **options)


def steps(model, optimizer, count, first=0):
    for seed in range(first, first + count):
        backward(model, seed)
        optimizer.step()
        optimizer.zero_grad()


def trained(plan, **options):
    model, optimizer = start(plan, **options)
    steps(model, optimizer, 4)
    return outcome(model, optimizer), unwall.stats(model)


def places(folder):
    yield "device", DEVICE
    yield "host", HOST
    yield "states on disk", {"params": "host", "optimizer": "disk", "disk": folder}
    yield "disk", on_disk(folder)
    yield "device and host", {"device_bytes": 600_000}
    yield "device, host and disk", {"device_bytes": 600_000, "host_bytes": 700_000, "disk": folder}


@pytest.mark.parametrize("states", ["exact", "lean"])
def test_the_bits_are_those_of_kept_gradients(tmp_path, states):
    expected, _ = trained({**DEVICE, "states": states})
    for name, place in places(tmp_path):
        got, stats = trained({**place, "grads": "transient", "states": states})
        assert [key for key in expected if not torch.equal(expected[key], got[key])] == [], name
        for tier in stats.tiers.values():
            assert tier.budget_bytes is None or tier.peak_bytes <= tier.budget_bytes, name


def test_nothing_is_kept_of_them():
    model, optimizer = start({**HOST, "grads": "transient"})
    own = [group.own_numel for group in unwall.api.engine(model).groups]
    assert sum(own) == NUMEL
    steps(model, optimizer, 3)
    drain()
    assert unwall.stats(model).tiers["host"].peak_bytes <= 12 * NUMEL + 3 * 2 * max(own)
    model, optimizer = start({**DEVICE, "grads": "transient"})
    steps(model, optimizer, 2)
    backward(model, 5)
    assert unwall.stats(model).tiers["device"].live_bytes <= 12 * NUMEL + 20_000


def test_a_larger_model_fits():
    least = {**HOST, "host_bytes": 13 * NUMEL}
    with pytest.raises(PlanError, match="does not fit"):
        start(least)
    _, stats = trained({**least, "grads": "transient"})
    assert stats.tiers["host"].peak_bytes <= 13 * NUMEL


@pytest.mark.parametrize("place", [DEVICE, HOST])
def test_looking_at_one_says_where_it_went(place):
    model, optimizer = start({**place, "grads": "transient"})
    backward(model, 0)
    drain()
    for look in (
        lambda: model[2][0].weight.grad.sum(),
        lambda: torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0),
        lambda: optimizer.clip_grad_norm_(1.0),
    ):
        with pytest.raises(RuntimeError, match=r"gone: update_in_backward=True has used it.*Plan\(grads='auto'\)"):
            look()
    optimizer.step()
    steps(model, optimizer, 1, first=1)


@pytest.mark.parametrize("place", [DEVICE, HOST])
def test_a_second_backward_before_the_step_is_refused_and_nothing_is_lost(place):
    expected = trained({**place, "grads": "transient"})[0]
    model, optimizer = start({**place, "grads": "transient"})
    steps(model, optimizer, 3)
    backward(model, 3)
    with pytest.raises(RuntimeError, match="a second backward"):
        backward(model, 4)
    optimizer.step()
    optimizer.zero_grad()
    got = outcome(model, optimizer)
    assert [key for key in expected if not torch.equal(expected[key], got[key])] == []


def test_whoever_would_use_them_at_the_step_is_refused():
    model = build()
    unwall.shard(model, Plan(**HOST, grads="transient"))
    for make in (
        lambda: unwall.AdamW(model.parameters()),
        lambda: unwall.wrap(torch.optim.SGD(model.parameters(), lr=0.1)),
    ):
        with pytest.raises(ValueError, match="update_in_backward=True"):
            make()


def test_without_an_optimizer_they_are_kept_as_far_as_there_is_room():
    model = build()
    unwall.shard(model, Plan(**HOST, grads="transient"))
    ledger = unwall.api.engine(model).tiers.host.ledger
    ledger.budget_bytes = ledger.live_bytes + 4 * 2 * 10_240  # four gradients
    with pytest.raises(BudgetError) as found:
        backward(model, 0)
    assert "update_in_backward=True" in "".join(found.value.__notes__)
    ledger.budget_bytes = None
    model.zero_grad()
    backward(model, 0)
    with pytest.raises(RuntimeError, match="a second backward"):
        backward(model, 1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"passes": 2}, "passes=1"),
        ({"compute_dtype": torch.float16}, "torch.bfloat16"),
        ({"grads": "transitory"}, "auto, device, host, disk, transient"),
    ],
)
def test_what_does_not_go_with_it(options, message):
    with pytest.raises(PlanError, match=message):
        Plan(**{"grads": "transient", **options})


def test_moving_keeps_it_as_it_is(tmp_path):
    model, optimizer = start({**HOST, "grads": "transient"})
    steps(model, optimizer, 2)
    with pytest.raises(PlanError, match="shard it anew"):
        unwall.move(model, Plan(**HOST))
    unwall.move(model, Plan(**on_disk(tmp_path), grads="transient"))
    steps(model, optimizer, 2, first=2)
    expected, got = trained({**HOST, "grads": "transient"})[0], outcome(model, optimizer)
    assert [key for key in expected if not torch.equal(expected[key], got[key])] == []


class Recomputed(nn.Module):
    """Its blocks are used in backward, too, so they are updated while a pass uses them."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(build()[:6])

    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x


def test_updates_on_the_device_are_not_taken_for_writes_of_the_users():
    results, seen = [], []
    for grads in ("auto", "transient"):
        model = Recomputed()
        unwall.shard(model, Plan(**DEVICE, grads=grads))
        optimizer = unwall.AdamW(model.parameters(), lr=1e-2, update_in_backward=True)
        for group in unwall.api.engine(model).groups if grads == "transient" else ():
            group.faces.written = seen.append
        for seed in range(3):
            torch.manual_seed(seed)
            model(torch.randn(16, 64)).float().square().mean().backward()
            optimizer.step()
        results.append(outcome(model, optimizer))
    assert [name for name in results[0] if not torch.equal(results[0][name], results[1][name])] == []
    assert seen == []


class Twice(nn.Module):
    """Its weight is read again by a node that autograd runs after its gradient is known."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x):
        return self.linear(x @ self.linear.weight.detach())


@pytest.mark.parametrize("grads", ["auto", "transient"])
def test_parameters_that_are_read_after_their_update_on_the_device(grads):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Twice())
    unwall.shard(model, Plan(**DEVICE, grads=grads))
    optimizer = unwall.AdamW(model.parameters(), lr=1e-2, update_in_backward=True)
    if grads == "auto":
        steps_of(model, optimizer)
        return
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation|changed"):
        steps_of(model, optimizer)


def steps_of(model, optimizer):
    for _ in range(2):
        model(torch.randn(4, WIDTH)).float().square().mean().backward()
        optimizer.step()


def test_shared_and_frozen_parameters_and_tiles(tmp_path):
    def run(plan):
        torch.manual_seed(0)
        model = nn.ModuleDict({"embed": nn.Embedding(50, WIDTH), "body": build(), "head": nn.Linear(WIDTH, 50, bias=False)})
        model["body"] = model["body"][:6]
        model["head"].weight = model["embed"].weight
        model["body"][2].requires_grad_(False)
        forward = lambda ids: model["head"](model["body"](model["embed"](ids)))  # noqa: E731
        model.forward = forward
        unwall.shard(model, Plan(**plan))
        optimizer = unwall.AdamW(model.parameters(), lr=1e-2, update_in_backward=True)
        for seed in range(3):
            torch.manual_seed(seed)
            model(torch.randint(0, 50, (8,))).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return outcome(model, optimizer)

    expected = run(DEVICE)
    for name, place in places(tmp_path):
        for tiles in (None, 4):
            got = run({**place, "grads": "transient", "tiles": tiles})
            assert [key for key in expected if not torch.equal(expected[key], got[key])] == [], (name, tiles)


class Reentrant(nn.Module):
    """Checkpoints that run a backward of their own for each block, seven to a group, between modules outside of them."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(32, 32)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(20))
        self.last = nn.Linear(32, 32)

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=True)
        return self.last(x)


@pytest.mark.parametrize("grads", ["auto", "transient"])
def test_reentrant_checkpoints_bring_the_gradients_of_a_group_one_after_the_other(tmp_path, grads):
    def run(plan, **options):
        model = Reentrant()
        unwall.shard(model, Plan(**plan))
        optimizer = unwall.AdamW(model.parameters(), lr=1e-2, **options)
        for seed in range(3):
            torch.manual_seed(seed)
            model(torch.randn(4, 32)).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return outcome(model, optimizer)

    expected = run(DEVICE)
    for name, place in places(tmp_path):
        got = run({**place, "grads": grads}, update_in_backward=True)
        assert [key for key in expected if not torch.equal(expected[key], got[key])] == [], name


class Chosen(nn.Module):
    """Uses one of its experts, all of which lie in one group."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x, which):
        return self.experts[which](x)


@pytest.mark.parametrize("place", [DEVICE, HOST, {}])
def test_zeros_that_zero_grad_leaves_count_beside_gradients_that_were_used(place):
    results = []
    for grads in ("auto", "transient"):
        model = Chosen()
        unwall.shard(model, Plan(**place, grads=grads))
        optimizer = unwall.AdamW(model.parameters(), lr=1e-2, update_in_backward=grads == "transient")
        for seed, which in enumerate((0, 1, 2, 0, 0, 1)):
            torch.manual_seed(seed)
            model(torch.randn(4, 8), which).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
        results.append(outcome(model, optimizer))
    assert [name for name in results[0] if not torch.equal(results[0][name], results[1][name])] == []


def least_budgets(make, plan):
    """The plan with the smallest budgets that are accepted."""
    for _ in range(20):
        try:
            unwall.shard(make(), Plan(**plan))
            return plan
        except PlanError as error:
            name, value = re.search(r"(device_bytes|host_bytes)=(\d+)\)", str(error)).groups()
            plan = {**plan, name: int(value)}
    raise AssertionError


class Ignored(nn.Module):
    """A part of each block has outputs that nobody uses: its gradients are awaited to the end of backward."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.ModuleList(nn.Linear(32, 32) for _ in range(2)) for _ in range(24))

    def forward(self, x):
        for used, ignored in self.blocks:
            ignored(x)
            x = torch.tanh(used(x))
        return x


def frozen_body():
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(128, 128) for _ in range(4)), nn.Linear(128, 32))
    model[:4].requires_grad_(False)
    return model


@pytest.mark.parametrize("make", [Ignored, frozen_body])
def test_the_smallest_budget_that_is_accepted_is_enough(tmp_path, make):
    def run(plan):
        model = make()
        unwall.shard(model, Plan(**plan))
        optimizer = unwall.AdamW(model.parameters(), lr=1e-2, update_in_backward=True)
        width = 32 if make is Ignored else 128
        for seed in range(3):
            torch.manual_seed(seed)
            model(torch.randn(4, width)).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        drain()
        return outcome(model, optimizer), unwall.stats(model).tiers

    expected, _ = run(DEVICE)
    for place in (HOST, on_disk(tmp_path), {"params": "host", "optimizer": "disk", "disk": tmp_path}):
        for budgets in ({"host_bytes": 1000}, {"host_bytes": 1000, "device_bytes": 1000}):
            plan = least_budgets(make, {**place, **budgets, "grads": "transient"})
            got, tiers = run(plan)
            assert [key for key in expected if not torch.equal(expected[key], got[key])] == [], plan
            assert tiers["host"].peak_bytes <= plan["host_bytes"], plan


def test_moving_to_the_device_leaves_nothing_on_the_host():
    model, optimizer = start({**HOST, "grads": "transient"})
    steps(model, optimizer, 2)
    unwall.move(model, Plan(**DEVICE, grads="transient"))
    assert unwall.stats(model).tiers["host"].live_bytes == 0
    steps(model, optimizer, 2, first=2)
    expected, got = trained({**HOST, "grads": "transient"})[0], outcome(model, optimizer)
    assert [key for key in expected if not torch.equal(expected[key], got[key])] == []


class ReadAgain(nn.Module):
    """A checkpoint recomputes with a weight, past autograd, when that has its gradient."""

    def __init__(self, read):
        super().__init__()
        torch.manual_seed(0)
        self.before = nn.Linear(WIDTH, WIDTH)
        self.body = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(5)))
        self.last = nn.Linear(WIDTH, WIDTH)
        self.read = read

    def gated(self, x):
        return x * torch.tanh(self.read(self.last, x))

    def forward(self, x):
        return self.last(self.body(checkpoint(self.gated, self.before(x), use_reentrant=False)))


def without_grad(module, x):
    with torch.no_grad():
        return module(x)


READS = {
    "detached": lambda module, x: x @ module.weight.detach(),
    "data": lambda module, x: x @ module.weight.data,
    "no_grad": without_grad,
}


@pytest.mark.parametrize("read", READS)
@pytest.mark.parametrize("place", [DEVICE, {**HOST, "device_bytes": 1000}])
def test_a_recomputation_never_reads_what_was_updated_since(read, place):
    model = ReadAgain(READS[read])
    plan = least_budgets(lambda: ReadAgain(None), {**place, "grads": "transient"})
    unwall.shard(model, Plan(**plan))
    optimizer = unwall.AdamW(model.parameters(), lr=1e-2, update_in_backward=True)
    with pytest.raises(RuntimeError, match=r"last\.weight is read in backward after update_in_backward=True has updated it"):
        model(torch.randn(4, WIDTH)).float().square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    model.read = lambda _, x: x
    for _ in range(2):
        model(torch.randn(4, WIDTH)).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert model.last.weight.isfinite().all()


def test_parameters_that_nobody_steps_are_to_be_frozen():
    model = build()
    unwall.shard(model, Plan(**HOST, grads="transient"))
    optimizer = unwall.AdamW([param for param in model.parameters() if param.dim() == 2], update_in_backward=True)
    steps(model, optimizer, 1)
    with pytest.raises(RuntimeError, match=r"no optimizer steps.*requires_grad_\(False\)"):
        backward(model, 1)


def test_looking_at_a_gradient_that_nobody_steps_does_not_disturb_an_update_of_the_others():
    results = []
    for grads in ("auto", "transient"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
        unwall.shard(model, Plan(**HOST, grads=grads))
        optimizer = unwall.AdamW([layer.weight for layer in model], lr=1e-2, update_in_backward=True)
        go_on = threading.Event()
        HostUpdate(until(go_on), FailureDomain())  # the update thread has other work
        model(torch.randn(4, WIDTH)).float().square().mean().backward()
        optimizer.step()
        threading.Timer(0.3, go_on.set).start()
        assert [bool(layer.bias.grad.any()) for layer in model] == [True, True]
        results.append(outcome(model, optimizer))
    assert [name for name in results[0] if not torch.equal(results[0][name], results[1][name])] == []


@pytest.mark.parametrize("place", [DEVICE, HOST])
def test_zeros_of_one_optimizer_are_not_used_in_the_step_of_another(place):
    results = []
    for grads in ("auto", "transient"):
        model = build()
        unwall.shard(model, Plan(**place, grads=grads))
        matrices, vectors = ([param for param in model.parameters() if param.dim() == dim] for dim in (2, 1))
        optimizers = [unwall.AdamW(part, lr=1e-2, update_in_backward=True) for part in (matrices, vectors)]
        for seed in range(3):
            backward(model, seed)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad(set_to_none=False)
        results.append(outcome(model, optimizers[0]) | {"vectors": optimizers[1].state_dict()["state"][0]["exp_avg"]})
    assert [name for name in results[0] if not torch.equal(results[0][name], results[1][name])] == []
