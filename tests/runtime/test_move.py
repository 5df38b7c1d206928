"""``unwall.move``: states change tiers between steps, and nothing else changes."""

import dataclasses
import gc

import pytest
import torch
from ranks import rank_and_world
from reference import seeded
from torch import nn

import unwall
from unwall.plans import Plan, PlanError

TIERS = {
    "device": {"params": "device", "optimizer": "device"},
    "host": {"params": "host", "optimizer": "host"},
    "disk": {"params": "disk", "optimizer": "disk"},
    "split": {"params": "host", "optimizer": "disk"},
    "resident": {"params": "device", "optimizer": "host"},
}
ROUND = ("device", "host", "disk", "device", "resident", "split", "host", "device")


def chain():
    return nn.Sequential(*[layer for _ in range(4) for layer in (nn.Linear(64, 64), nn.Tanh())])


def steps(model, optimizer, count, begin):
    rank, world = rank_and_world()
    for step in range(begin, begin + count):
        x = torch.randn(4 * world, 64, generator=torch.Generator().manual_seed(step))[4 * rank : 4 * rank + 4]
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def everything(model, optimizer, average):
    found = [*model.state_dict().values()]
    for state in optimizer.state_dict()["state"].values():
        found += [value for value in state.values() if isinstance(value, torch.Tensor)]
    return [value.clone() for value in (*found, *average.state_dict()["params"].values())]


def trained(tiers, folder, options, optimizer):
    """A few steps on each tier in turn."""
    model = seeded(chain)
    plan = Plan(disk=folder, **TIERS[tiers[0]], **options)
    unwall.shard(model, plan)
    make = {"adamw": lambda params: unwall.AdamW(params, lr=0.01), "wrap": lambda params: unwall.wrap(_sgd(params))}
    optimizer = make[optimizer](model.parameters())
    average = unwall.ema(model, 0.9)
    for number, tier in enumerate(tiers):
        if number:
            unwall.move(model, dataclasses.replace(plan, **TIERS[tier]))
        steps(model, optimizer, 1, number)
        average.update()
    return everything(model, optimizer, average)


def _sgd(params):
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


@pytest.mark.parametrize(
    ("world", "stage", "dtype", "optimizer"),
    [
        (1, 3, torch.bfloat16, "adamw"),
        (1, 3, torch.float32, "wrap"),
        (2, 3, torch.bfloat16, "adamw"),
        (2, 2, torch.float32, "adamw"),
        (2, 0, torch.bfloat16, "wrap"),
    ],
)
def test_states_that_move_are_the_same_bits(ranks, tmp_path, world, stage, dtype, optimizer):
    options = {"stage": stage, "compute_dtype": dtype}
    moved = ranks(world).run(trained, ROUND, tmp_path, options, optimizer)
    stayed = ranks(world).run(trained, ("host",) * len(ROUND), tmp_path, options, optimizer)
    for one, other in zip(moved, stayed, strict=True):
        assert len(one) == len(other)
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def freed(folder, world_of):
    """Bytes on the tiers before and after moves, and what the model gives."""
    plan = Plan(compute_dtype=torch.float32, disk=folder, **TIERS["device"])
    model = seeded(chain)
    unwall.shard(model, plan)
    optimizer = unwall.AdamW(model.parameters(), lr=0.01)
    steps(model, optimizer, 2, 0)
    found = [{name: tier.live_bytes for name, tier in unwall.stats(model).tiers.items()}]
    for tier in ("host", "disk", "device"):
        unwall.move(model, dataclasses.replace(plan, **TIERS[tier]))
        found.append({name: tier.live_bytes for name, tier in unwall.stats(model).tiers.items()})
    assert not list(folder.iterdir()) or world_of > 1  # the files go with the last state on disk
    return found


@pytest.mark.parametrize("world", [1, 2])
def test_a_move_frees_the_tier_it_leaves(ranks, tmp_path, world):
    for before, host, disk, back in ranks(world).run(freed, tmp_path, world):
        states = 12 * 4 * 65 * 64 // world
        assert before["device"] >= states
        assert host["device"] == 0
        assert host["host"] >= states
        assert disk["device"] == 0
        assert disk["disk"] >= states
        assert back == before


def sharded(folder, **options):
    model = seeded(chain)
    plan = Plan(compute_dtype=torch.float32, disk=folder, **options)
    unwall.shard(model, plan)
    return model, plan, unwall.AdamW(model.parameters(), lr=0.01)


def test_a_plan_that_changes_more_than_tiers_is_refused_by_name(tmp_path):
    model, plan, _ = sharded(tmp_path)
    for field, value in (("stage", 2), ("compute_dtype", torch.bfloat16), ("reduce_op", "sum"), ("passes", 2)):
        with pytest.raises(PlanError, match=f"tiers and budgets only, but {field} is"):
            unwall.move(model, dataclasses.replace(plan, **{field: value}))


@pytest.mark.parametrize("tier", ["device", "host"])
def test_a_move_waits_for_the_end_of_a_pass(tmp_path, tier):
    model, plan, optimizer = sharded(tmp_path, **TIERS[tier])
    other = dataclasses.replace(plan, **TIERS["disk"])
    x = torch.ones(2, 64)
    inside = model[2].register_forward_hook(lambda *_: unwall.move(model, other))
    with pytest.raises(RuntimeError, match="inside a forward"):
        model(x)
    inside.remove()
    loss = model(x).sum()
    with pytest.raises(RuntimeError, match="whose backward has not run"):
        unwall.move(model, other)
    loss.backward()
    with pytest.raises(RuntimeError, match=r"gradients are held.*zero_grad"):
        unwall.move(model, other)
    with unwall.full_params(model), pytest.raises(RuntimeError, match=r"inside unwall\.full_params"):
        unwall.move(model, other)
    optimizer.step()
    unwall.move(model, other)
    assert unwall.stats(model).tiers["device"].live_bytes == 0
    steps(model, optimizer, 1, 0)


def test_a_plan_that_does_not_fit_changes_nothing(tmp_path):
    model, plan, optimizer = sharded(tmp_path, **TIERS["host"])
    steps(model, optimizer, 2, 0)
    before = unwall.stats(model).tiers
    values = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(PlanError, match="states on the device take"):
        unwall.move(model, dataclasses.replace(plan, **TIERS["device"], device_bytes=300_000))
    assert {name: tier.live_bytes for name, tier in unwall.stats(model).tiers.items()}["host"] == before["host"].live_bytes
    assert all(torch.equal(value, values[name]) for name, value in model.state_dict().items())
    unwall.move(model, dataclasses.replace(plan, host_bytes="1 GiB", device_bytes=300_000))
    assert unwall.stats(model).tiers["host"].budget_bytes == 1 << 30
    assert unwall.stats(model).tiers["device"].budget_bytes == 300_000
    steps(model, optimizer, 1, 2)


def test_a_tier_that_fails_half_way_leaves_everything_where_it_was(tmp_path, monkeypatch):
    model, plan, optimizer = sharded(tmp_path, **TIERS["device"])
    steps(model, optimizer, 2, 0)
    engine, taken = unwall.api.engine(model), []
    values = {name: value.clone() for name, value in model.state_dict().items()}
    allocate = engine.tiers.host.allocate

    def refuses(nbytes, label="", pinned=False):
        taken.append(label)
        if len(taken) == 9:
            raise MemoryError("no more")
        return allocate(nbytes, label, pinned)

    monkeypatch.setattr(engine.tiers.host, "allocate", refuses)
    with pytest.raises(MemoryError, match="no more"):
        unwall.move(model, dataclasses.replace(plan, **TIERS["host"]))
    assert unwall.stats(model).tiers["host"].live_bytes == 0
    assert all(torch.equal(value, values[name]) for name, value in model.state_dict().items())
    steps(model, optimizer, 1, 2)


def test_garbage_that_holds_a_loss_is_nobody(tmp_path):
    """As an error leaves it that was caught."""
    model, plan, optimizer = sharded(tmp_path, **TIERS["host"])
    steps(model, optimizer, 1, 0)
    gc.disable()
    try:
        circle = [model(torch.ones(2, 64)).sum()]
        circle.append(circle)
        del circle
        unwall.move(model, dataclasses.replace(plan, **TIERS["device"]))
    finally:
        gc.enable()
