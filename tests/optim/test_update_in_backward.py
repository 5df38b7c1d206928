"""``update_in_backward=True``: updates in place while backward runs, for a promise that is held to."""

import pytest
import torch
from early_tools import HOST, backward, build, same, start, steps

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
