"""Gradients and states changed by hand, other norms, steps that are skipped: on every tier, the same bits as on the device."""

import math
import warnings

import pytest
import torch
from early_tools import DEVICE, HOST, backward, build, on_disk, outcome, same, start, steps
from ranks import rank_and_world
from torch import nn

import unwall
from unwall.optim.updates import drain
from unwall.plans import Plan

PLACES = ["device", "host", "disk"]


def placed(place, folder):
    return {"device": DEVICE, "host": HOST, "disk": on_disk(folder)}[place]


# -- updates ahead of the step ------------------------------------------------------------------------------------------


def in_place(model, optimizer):
    model[0][0].weight.grad.mul_(0.5)


def by_name(model, optimizer):
    grads = unwall.grads(model)
    grads["3.2.weight"] = grads["3.2.weight"].clamp(-1e-3, 1e-3)


def of_this_rank(model, optimizer):
    grads = unwall.grads(model)
    grads.set_part("6.weight", grads.part("6.weight") * 3)


def set_anew(model, optimizer):
    model[2][0].bias.grad = torch.ones_like(model[2][0].bias)


def taken_away(model, optimizer):
    del unwall.grads(model)["1.0.weight"]


def clipped_by_torch(model, optimizer):
    nn.utils.clip_grad_norm_(model.parameters(), 1e-2)


def clipped_and_looked_at(model, optimizer):
    optimizer.clip_grad_norm_(1e-2)
    norm = nn.utils.get_total_norm([p.grad for p in model.parameters()])
    assert abs(float(norm) - 1e-2) < 1e-4


def state_set(model, optimizer):
    states = optimizer.states(model[0][0].weight)
    states["exp_avg"] = torch.zeros_like(states["exp_avg"])


CHANGES = [in_place, by_name, of_this_rank, set_anew, taken_away, clipped_by_torch, clipped_and_looked_at, state_set]


@pytest.mark.parametrize("place", ["host", "disk"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_an_update_that_ran_ahead_is_done_again(place, dtype, tmp_path):
    """Whatever is changed between backward and step, after the update ahead has read it."""
    ready = []

    def scenario(model, optimizer):
        steps(model, optimizer, 3)
        for number, change in enumerate(CHANGES):
            backward(model, 10 + number)
            drain()
            ready.append(optimizer.ahead.ready)
            change(model, optimizer)
            optimizer.step()
            optimizer.zero_grad()
            steps(model, optimizer, 2, first=20 + 2 * number)

    stats = same(scenario, placed(place, tmp_path), dtype=dtype)
    assert all(count > 0 for count in ready[len(CHANGES) :])
    assert stats.speculated.missed > 0
    assert stats.speculated.committed > 0


def test_clipping_by_torch_that_does_nothing_leaves_updates_ahead_alone():
    def scenario(model, optimizer):
        for number in range(6):
            backward(model, number)
            drain()
            nn.utils.clip_grad_norm_(model.parameters(), 1e6)
            optimizer.step()
            optimizer.zero_grad()

    stats = same(scenario)
    assert stats.speculated.committed > 0
    assert stats.speculated.missed == 0


def test_a_loop_that_clips_by_torch_in_every_step_is_not_speculated_on():
    def scenario(model, optimizer):
        for number in range(6):
            backward(model, number)
            clipped_by_torch(model, optimizer)
            optimizer.step()
            optimizer.zero_grad()

    stats = same(scenario)
    assert (stats.speculated.committed, stats.speculated.missed) == (0, 0)


# -- steps that are skipped ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_step_that_is_not_finite_is_skipped(place, dtype, tmp_path):
    model, optimizer = start(placed(place, tmp_path), dtype, skip_nonfinite=True)
    steps(model, optimizer, 12)  # enough of them to be speculated on
    before = outcome(model, optimizer)
    backward(model, 50, scale=math.inf)
    drain()
    optimizer.step()
    assert all(p.grad is None for p in model.parameters())
    after = outcome(model, optimizer)
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert (unwall.stats(model).skipped_steps, unwall.stats(model).steps) == (1, 12)
    steps(model, optimizer, 1, first=51)
    twin, other = start(DEVICE, dtype)
    steps(twin, other, 12)
    steps(twin, other, 1, first=51)
    expected, got = outcome(twin, other), outcome(model, optimizer)
    assert [name for name in expected if not torch.equal(expected[name], got[name])] == []


def skips(place, folder):
    """Only one rank has a gradient that is not finite."""
    rank, _ = rank_and_world()
    model, optimizer = start(placed(place, folder), skip_nonfinite=True)
    backward(model, 0, scale=math.nan if rank == 1 else 1.0)
    optimizer.step()
    return unwall.stats(model).skipped_steps


def test_all_ranks_skip_together(ranks, tmp_path):
    assert ranks(2).run(skips, "host", tmp_path) == [1, 1]


def test_update_in_backward_cannot_skip():
    with pytest.raises(ValueError, match="cannot skip a step"):
        start(HOST, update_in_backward=True, skip_nonfinite=True)


def test_fp16_without_a_loss_scale_is_noticed():
    model, optimizer = start(HOST, torch.float16)
    backward(model, 0)
    with pytest.warns(UserWarning, match=r"optimizer.scale\(loss\)"):
        optimizer.step()
    twin, other = start(HOST, torch.float16)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        other.scale(twin(torch.ones(2, 64)).float().mean()).backward()
        other.step()


# -- norms --------------------------------------------------------------------------------------------------------------


def clipped(place, folder, order):
    rank, _ = rank_and_world()
    model, optimizer = start(placed(place, folder), torch.float32)
    backward(model, rank)
    each = unwall.grads(model).norms(order)
    said = optimizer.clip_grad_norm_(1e-3, norm_type=order)
    got = {name: grad.clone() for name, grad in unwall.grads(model).items()}
    optimizer.step()
    return float(said), each, got


@pytest.mark.parametrize("order", [1.0, 2.0, 3.5, math.inf])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("world", [1, 2])
def test_clipping_by_any_norm(ranks, world, place, order, tmp_path):
    plain = build()
    for rank in range(world):
        backward(plain, rank, 1 / world)
    each = {name: torch.linalg.vector_norm(p.grad, order) for name, p in plain.named_parameters()}
    expected = float(nn.utils.clip_grad_norm_(plain.parameters(), 1e-3, norm_type=order))
    for said, norms, got in ranks(world).run(clipped, place, tmp_path, order):
        assert abs(said - expected) <= 1e-5 * expected
        assert list(norms) == list(each)
        assert all(abs(float(norms[name]) - float(each[name])) <= 1e-5 * float(each[name]) for name in each)
        assert all(torch.allclose(got[name], p.grad, rtol=1e-4, atol=1e-9) for name, p in plain.named_parameters())


def test_a_norm_that_is_none_is_refused():
    model, optimizer = start(HOST)
    backward(model, 0, scale=math.inf)
    with pytest.raises(ValueError, match="positive number or inf, got 0"):
        optimizer.clip_grad_norm_(1.0, norm_type=0)
    with pytest.raises(RuntimeError, match="not finite"):
        optimizer.clip_grad_norm_(1.0, error_if_nonfinite=True)


# -- by name ------------------------------------------------------------------------------------------------------------


def test_gradients_by_name_refuse_what_is_not_there():
    model, _ = start(HOST)
    grads = unwall.grads(model)
    assert (len(grads), list(grads)) == (0, [])
    with pytest.raises(KeyError, match="run backward first"):
        grads["0.0.weight"]
    with pytest.raises(KeyError, match="no parameter of this model"):
        grads["nothing"]
    with pytest.raises(ValueError, match=r"has shape \(128, 64\), got \(2,\)"):
        grads["0.0.weight"] = torch.zeros(2)
    with pytest.raises(RuntimeError, match="not sharded"):
        unwall.grads(nn.Linear(2, 2))


def edited(place, folder, wrapped, dtype):
    """Reads and sets every state of one parameter, then trains on. Gives what was read and what came of it."""
    rank, _ = rank_and_world()
    model = build()
    unwall.shard(model, Plan(compute_dtype=dtype, **placed(place, folder)))
    params = list(model.parameters())
    inner = torch.optim.SGD(params, lr=1e-2, momentum=0.9) if wrapped else None
    optimizer = unwall.wrap(inner) if wrapped else unwall.AdamW(params, lr=1e-2)
    for number in range(2):
        backward(model, number)
        optimizer.step()
    states = optimizer.states(params[4])
    before = {name: states[name] for name in states}
    for name, value in before.items():
        states[name] = value + 1
    part = states.part("master")
    states.set_part("master", part * 2)
    after = {name: states[name] for name in states}
    backward(model, 5)
    optimizer.step()
    state = model.state_dict()
    numbers = {name: value for name, value in before.items() if not isinstance(value, torch.Tensor)}
    return before, after, numbers, state["2.0.weight"] if rank == 0 else None


@pytest.mark.parametrize("wrapped", [False, True], ids=["AdamW", "SGD"])
@pytest.mark.parametrize("world", [1, 2])
def test_states_of_a_parameter(ranks, world, wrapped, tmp_path):
    results = {}
    for place in PLACES:
        for before, after, numbers, trained in ranks(world).run(edited, place, tmp_path, wrapped, torch.bfloat16):
            assert list(before) == (
                ["momentum_buffer", "step", "master"] if wrapped else ["exp_avg", "exp_avg_sq", "step", "master"]
            )
            assert numbers == {"step": 2}
            assert after["step"] == 3
            for name in set(before) - {"step", "master"}:
                assert torch.equal(after[name], before[name] + 1)
            assert torch.equal(after["master"], (before["master"] + 1) * 2)
            assert after["master"].shape == (128, 64)
            if trained is not None:
                results[place] = trained
    assert torch.equal(results["device"], results["host"])
    assert torch.equal(results["device"], results["disk"])


def test_states_refuse_what_is_not_there():
    model, optimizer = start(HOST)
    states = optimizer.states(model[0][0].weight)
    with pytest.raises(KeyError, match="there are exp_avg, exp_avg_sq, step, master"):
        states["momentum"]
    with pytest.raises(ValueError, match=r"shape \(128, 64\), got \(3,\)"):
        states["exp_avg"] = torch.zeros(3)
    with pytest.raises(KeyError, match="does not update"):
        optimizer.states(nn.Parameter(torch.zeros(2)))


# -- wrapped optimizers that raise --------------------------------------------------------------------------------------


class Raises(torch.optim.SGD):
    """Raises once (not for the probe, which is small), in the middle of a step: tensors have been written to."""

    armed = False

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for number, param in enumerate(group["params"]):
                if type(self).armed and param.numel() > 100 and number == len(group["params"]) - 1:
                    param.sub_(100.0)
                    for state in self.state.values():
                        state["momentum_buffer"].fill_(7.0)
                    type(self).armed = False
                    raise ArithmeticError("in the middle")
        super().step()


@pytest.mark.parametrize("plan", [{"params": "host", "optimizer": "disk"}, {"params": "disk", "optimizer": "host"}])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_wrapped_optimizer_that_raises_is_not_applied_twice(plan, dtype, tmp_path):
    ends = []
    for armed in (False, True):
        model = build()
        unwall.shard(model, Plan(compute_dtype=dtype, disk=tmp_path, **plan))
        optimizer = unwall.wrap(Raises(model.parameters(), lr=1e-2, momentum=0.9))
        for number in range(4):
            optimizer.scale(model(torch.full((2, 64), float(number))).float().square().mean()).backward()
            Raises.armed = armed and number == 2
            optimizer.step()
            if armed and number == 2:
                with pytest.raises(RuntimeError, match="ArithmeticError: in the middle"):
                    unwall.stats(model)
        ends.append(model.state_dict())
    assert [name for name in ends[0] if not torch.equal(ends[0][name], ends[1][name])] == []
