"""``update_in_backward=True``: updates in place while backward runs, for a promise that is held to."""

import copy

import pytest
import torch
from early_tools import HOST, backward, build, outcome, same, start, steps

import unwall
from unwall.optim.updates import drain
from unwall.plans import Plan


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_update_in_backward_gives_the_same_bits(tier, tmp_path):
    plan = {"params": tier, "optimizer": tier, **({"disk": tmp_path} if tier == "disk" else {})}
    stats = same(lambda model, optimizer: steps(model, optimizer, 5), plan, update_in_backward=True)
    assert stats.speculated.committed == 0  # no shadow was needed


def test_update_in_backward_refuses_a_second_backward():
    model, _optimizer = start(HOST, update_in_backward=True)
    backward(model, 0)
    with pytest.raises(RuntimeError, match="second backward"):
        backward(model, 1)


def test_update_in_backward_refuses_numbers_that_changed():
    model, optimizer = start(HOST, update_in_backward=True)
    backward(model, 0)
    optimizer.param_groups[0]["lr"] = 1.0
    with pytest.raises(RuntimeError, match="learning rate"):
        optimizer.step()


def test_update_in_backward_refuses_to_forget_gradients_it_has_used():
    model, optimizer = start(HOST, update_in_backward=True)
    backward(model, 0)
    with pytest.raises(RuntimeError, match="zero_grad"):
        optimizer.zero_grad()


def test_update_in_backward_cannot_clip():
    model = build()
    unwall.shard(model, Plan(**HOST))
    with pytest.raises(ValueError, match="cannot clip"):
        unwall.AdamW(model.parameters(), max_grad_norm=1.0, update_in_backward=True)


@pytest.mark.parametrize("grads", ["auto", "transient"])
def test_another_optimizer_does_not_use_the_same_gradients_again(grads):
    model, optimizer = start({**HOST, "grads": grads}, update_in_backward=True)
    steps(model, optimizer, 1)
    backward(model, 1)
    del optimizer
    drain()
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    other = unwall.AdamW(model.parameters(), lr=1e-2, update_in_backward=True)
    with pytest.raises(RuntimeError, match=r"would count twice.*model\.zero_grad\(\)"):
        other.step()
    drain()
    assert [name for name, value in model.state_dict().items() if not torch.equal(value, weights[name])] == []
    assert not other.state_dict()["state"], "no step was counted"
    model.zero_grad()
    steps(model, other, 2, first=2)


@pytest.mark.parametrize("grads", ["auto", "transient"])
def test_what_would_lose_updates_between_backward_and_step_is_refused(grads, tmp_path):
    def trained(between):
        model, optimizer = start({**HOST, "grads": grads}, update_in_backward=True)
        steps(model, optimizer, 2)
        unwall.save(tmp_path, model, optimizer)
        weights, states = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
        backward(model, 2)
        for act in between(model, optimizer, weights, states):
            with pytest.raises(RuntimeError, match=r"between backward\(\) and step\(\).*after step\(\)"):
                act()
        optimizer.step()
        steps(model, optimizer, 1, first=3)
        return outcome(model, optimizer)

    def between(model, optimizer, weights, states):
        def write():
            with torch.no_grad():
                model[3][0].weight.mul_(0.5)
            model(torch.zeros(1, 64))

        def write_all():
            with unwall.full_params(model, write=True):
                pass

        def write_state():
            optimizer.states(model[3][0].weight)["exp_avg"] = torch.zeros(128, 64)

        yield optimizer.state_dict
        yield lambda: optimizer.load_state_dict(states)
        yield lambda: model.load_state_dict(weights)
        yield lambda: unwall.load(tmp_path, model)
        yield from (write, write_all, write_state)

    expected, got = trained(lambda *_: ()), trained(between)
    assert [name for name in expected if not torch.equal(expected[name], got[name])] == []


@pytest.mark.parametrize("grads", ["auto", "transient"])
@pytest.mark.parametrize("tier", ["host", "disk"])
def test_who_looks_between_backward_and_step_sees_one_state(tier, grads, tmp_path):
    plan = {"params": tier, "optimizer": tier, "grads": grads, **({"disk": tmp_path} if tier == "disk" else {})}
    model, optimizer = start(plan, update_in_backward=True)
    for number in range(3):
        backward(model, number)
        seen = copy.deepcopy(model.state_dict())
        optimizer.step()
        optimizer.zero_grad()
        assert [name for name, value in model.state_dict().items() if not torch.equal(value, seen[name])] == []
