"""unwall.ema: a sharded average on any tier, against the same average of plain tensors."""

import tempfile

import pytest
import torch
from offload import Setup, named_budget, over_budget, smallest, step
from offload import build as blocks
from ranks import rank_and_world
from torch import nn

import unwall
from unwall.shards.control import PeerError


def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 40))


def shard(model, tier, dtype, stage=3):
    tiers = {} if tier == "device" else {"params": tier, "optimizer": tier}
    if tier == "disk":
        tiers["disk"] = tempfile.mkdtemp()
    return unwall.shard(model, unwall.Plan(compute_dtype=dtype, stage=stage, **tiers))


def whole(model):
    with unwall.full_params(model):
        return {name: param.detach().clone() for name, param in model.named_parameters()}


def run(tier, dtype, stage=3):
    model = shard(build(), tier, dtype, stage)
    optimizer, average = unwall.AdamW(model.parameters(), lr=1e-2), unwall.ema(model, 0.8)
    expected, x = whole(model), torch.randn(4, 40, generator=torch.Generator().manual_seed(1))
    for _ in range(3):
        model(x).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        average.update()
        for name, value in whole(model).items():
            expected[name].lerp_(value, 1.0 - 0.8)
    trained, output = whole(model), model(x).detach()
    with average.swap():
        swapped, inside = whole(model), model(x).detach()
    state, again = average.state_dict(), unwall.ema(model, 0.5)
    again.load_state_dict(state)
    with again.swap():
        loaded = whole(model)
    assert (again.decay, again.updates) == (0.8, 3)
    assert all(torch.equal(value, trained[name]) for name, value in whole(model).items())
    assert torch.equal(model(x).detach(), output)
    assert not torch.equal(inside, output)
    assert bool(state["params"]) == (rank_and_world()[0] == 0)
    return expected, swapped, loaded, state["params"]


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_average_is_that_of_plain_tensors(ranks, world, dtype):
    for tier, stage in (("device", 3), ("host", 3), ("disk", 3), ("device", 0), ("device", 2))[: 3 if world == 1 else 5]:
        for rank, (expected, swapped, loaded, params) in enumerate(ranks(world).run(run, tier, dtype, stage)):
            torch.testing.assert_close(swapped, expected, rtol=1e-6, atol=1e-7)
            torch.testing.assert_close(loaded, swapped, rtol=0, atol=0)
            if rank == 0:
                torch.testing.assert_close(params, swapped, rtol=0, atol=0)


def disturbed(folder, act):
    """One rank's disk fails once in what ``act`` says. What each rank was told, and that nothing has changed by it."""
    model = unwall.shard(build(), unwall.Plan(compute_dtype=torch.float32, params="disk", optimizer="disk", disk=folder))
    optimizer, average = unwall.AdamW(model.parameters(), lr=1e-2), unwall.ema(model, 0.8)
    x, told = torch.ones(4, 40), []

    def step():
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    average.update()
    step()
    unwall.stats(model)
    before, kept = whole(model), average.state_dict()["params"]
    unwall.api.engine(model).finish()

    def swap():
        with average.swap():
            return whole(model)

    acts = {"swap": swap, "state_dict": average.state_dict}
    for strikes in (rank_and_world()[0] == rank_and_world()[1] - 1, False):
        if strikes:
            unwall.api.engine(model).tiers.disk.engine.inject_fault("read", 1 if act == "swap" else 0, 1, 5)
        try:
            result = acts[act]()
        except (OSError, PeerError) as error:
            told.append(type(error).__name__)
        same(before, whole(model))
    same(kept, average.state_dict()["params"])
    if rank_and_world()[0] == 0:
        same(kept, result["params"] if act == "state_dict" else result)
    return told


def same(one, other):
    assert one.keys() == other.keys()
    assert all(torch.equal(value, other[name]) for name, value in one.items())


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("act", ["swap", "state_dict"])
def test_a_fault_of_one_rank_is_everyones_and_changes_nothing(ranks, world, act, tmp_path):
    assert ranks(world).run(disturbed, str(tmp_path), act) == [["PeerError"]] * (world - 1) + [["DiskError"]]


def test_half_an_update_goes_on_and_is_told_where_it_cannot(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(4)))
    unwall.shard(model, unwall.Plan(compute_dtype=torch.float32, params="disk", optimizer="disk", disk=str(tmp_path)))
    optimizer, average = unwall.AdamW(model.parameters(), lr=1e-2), unwall.ema(model, 0.8)
    x, expected = torch.ones(4, 64), whole(model)

    def step():
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        unwall.stats(model)

    def fails():
        unwall.api.engine(model).tiers.disk.engine.inject_fault("read", 2, 1, 5)
        with pytest.raises(OSError, match="ema of group"):
            average.update()

    step()
    fails()
    with average.swap():
        assert unwall.api.engine(model).averaged
    with pytest.raises(KeyError), average.swap():
        raise KeyError("in an evaluation")
    average.update()
    for name, value in whole(model).items():
        expected[name].lerp_(value, 1.0 - 0.8)
    torch.testing.assert_close(average.state_dict()["params"], expected, rtol=1e-6, atol=1e-7)
    assert average.updates == 1
    step()
    fails()
    step()
    with pytest.warns(RuntimeWarning, match=r"\d groups of parameters have missed one update"):
        average.update()


def test_averages_that_are_gone_leave_nothing_in_the_engine():
    model = build()
    unwall.shard(model)
    checks = unwall.api.engine(model).checks
    unwall.ema(model, 0.9)
    before = len(checks)
    for _ in range(5):
        unwall.ema(model, 0.9)
    assert len(checks) == before


def test_bad_input():
    model = build()
    with pytest.raises(RuntimeError, match="not sharded"):
        unwall.ema(model)
    shard(model, "host", torch.float32)
    with pytest.raises(ValueError, match="decay"):
        unwall.ema(model, 1.5)
    average = unwall.ema(model)
    state = average.state_dict()
    state["params"]["0.bias"] = torch.ones(3)
    with pytest.raises(ValueError, match=r"0\.bias has shape"):
        average.load_state_dict(state)
    with pytest.raises(RuntimeError, match=r"inside ema\.swap"), average.swap(), torch.no_grad():
        model[0].weight.zero_()


def test_no_checkpoint_of_a_training_holds_the_averages(tmp_path):
    """Whoever resumed from it would go on with the averages as parameters, and the moments of others."""
    model = shard(build(), "host", torch.float32)
    optimizer, average = unwall.AdamW(model.parameters()), unwall.ema(model, 0.8)
    unwall.save(tmp_path / "saved", model, optimizer)
    with average.swap():
        with pytest.raises(RuntimeError, match="would resume training from the averages"):
            unwall.save(tmp_path / "saved", model, optimizer)
        with pytest.raises(RuntimeError, match="would load into the averages"):
            unwall.load(tmp_path / "saved", model, optimizer)
        unwall.export_weights(model, tmp_path / "averages")
        unwall.save(tmp_path / "weights", model)
        with pytest.raises(RuntimeError, match="weights would go into the averages"):
            unwall.load_weights(model, tmp_path / "averages")
    unwall.save(tmp_path / "saved", model, optimizer)
    unwall.load(tmp_path / "saved", model, optimizer)


def test_an_interrupt_in_a_forward_inside_a_swap_leaves_the_parameters(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4))
    unwall.shard(model, unwall.Plan(params="disk", optimizer="disk", disk=str(tmp_path), compute_dtype=torch.float32))
    average, x = unwall.ema(model, 0.5), torch.ones(2, 4)
    with torch.no_grad():
        model[0].weight.add_(1.0)
    average.update()
    expected = {name: value.clone() for name, value in model.state_dict().items()}

    def interrupt(*_):
        raise KeyboardInterrupt

    handle = model[1].register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt), average.swap():
        model(x)
    handle.remove()
    for name, value in model.state_dict().items():
        assert torch.equal(value, expected[name])


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("tier", ["device", "host"])
def test_an_average_leaves_the_room_that_training_needs(tier, first):
    """It is judged when it is made, before or after the optimizer, and not found too large in a step."""
    setup, budget = Setup(passes=2, dtype=torch.float32), f"{tier}_bytes"
    fields = {"params": tier, "optimizer": tier, "passes": 2, "compute_dtype": torch.float32}
    least = smallest(blocks(), budget, **fields)

    def begin(nbytes):
        model = unwall.shard(blocks(), unwall.Plan(**fields, **{budget: nbytes}))
        average = unwall.ema(model) if first else None
        optimizer = unwall.AdamW(model.parameters())
        return model, optimizer, average or unwall.ema(model)

    with pytest.raises(unwall.PlanError, match=r"does not fit with unwall\.ema") as refusal:
        begin(least)
    name, needed = named_budget(refusal.value)
    assert name == budget
    model, optimizer, average = begin(needed)
    for number in range(2):
        step(model, optimizer, setup, number)
        average.update()
    assert over_budget(model) == []
