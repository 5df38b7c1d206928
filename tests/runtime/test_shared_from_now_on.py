"""What people set ``.data`` and ``.grad`` to, and how modules and gradients get their values past the usual ways: as in plain
PyTorch, or it is told."""

import copy

import pytest
import torch
import torch.distributed as dist
from offload import smallest
from torch import nn
from torch.nn.utils import parametrizations

import unwall
from unwall.plans import Plan
from unwall.runtime import lent

WIDTH = 8


def build(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))


def sharded(model=None, tier="host"):
    model = build() if model is None else model
    fields = {"params": tier, "optimizer": tier, "compute_dtype": torch.float32}
    return unwall.shard(model, Plan(**fields, device_bytes=smallest(model, "device_bytes", **fields)))


def inputs(seed):
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(seed))


def loss_of(model, seed):
    return model(inputs(seed)).sub(1).square().mean()


def stepped(model, optimizer, change=None, steps=2):
    for step in range(steps):
        loss_of(model, step).backward()
        if change is not None:
            change(model)
        optimizer.step()
        optimizer.zero_grad()
    return {name: value.clone() for name, value in model.state_dict().items()}


def compared(change_model=None, change_gradients=None):
    """Differences from plain PyTorch after two steps; nothing on ranks other than the first."""
    found = []
    for model, make in ((build(), torch.optim.AdamW), (sharded(), unwall.AdamW)):
        model = model if change_model is None else change_model(model)
        found.append(stepped(model, make(model.parameters(), lr=1e-2, eps=1e-3), change_gradients))
    return {name: float((found[0][name] - value).abs().max()) for name, value in found[1].items()}


def set_and_parametrized(model):
    with torch.no_grad():
        model[0].weight.set_(torch.full((WIDTH, WIDTH), 0.05))
    parametrizations.orthogonal(model[2])
    return model


def test_set_gives_a_parameter_another_value():
    assert max(compared(set_and_parametrized).values()) < 2e-5


def sets_data_of_gradients(model):
    for param in model.parameters():
        param.grad.data = param.grad.data * 0.5


def averages_gradients(model):
    for param in model.parameters():
        if dist.is_initialized():
            dist.all_reduce(param.grad.data)
            param.grad.data /= dist.get_world_size()


def gradients_by_hand():
    return compared(change_gradients=sets_data_of_gradients), compared(change_gradients=averages_gradients)


def test_gradients_that_are_set_or_averaged_by_hand(ranks):
    for found in ranks(2).run(gradients_by_hand):
        assert all(far < 2e-5 for differences in found for far in differences.values())


def test_the_gradient_of_another_model():
    ones, others = [build(), build(1)], [sharded(), sharded(build(1))]
    for (first, second), make in ((ones, torch.optim.AdamW), (others, unwall.AdamW)):
        optimizer = make(second.parameters(), lr=1e-2, eps=1e-3)
        loss_of(first, 0).backward()
        for mine, theirs in zip(second.parameters(), first.parameters(), strict=True):
            mine.grad = theirs.grad
        optimizer.step()
    for plain, param in zip(ones[1].parameters(), others[1].parameters(), strict=True):
        torch.testing.assert_close(param.detach(), plain.detach(), rtol=1e-5, atol=1e-6)


def test_gradients_have_no_graph_and_say_so():
    model = sharded()
    optimizer = unwall.AdamW(model.parameters())
    loss_of(model, 0).backward(create_graph=True)
    with pytest.raises(RuntimeError, match=r"torch\.autograd\.grad\(loss, list\(model\.parameters\(\)\), create_graph=True\)"):
        sum(param.grad.square().sum() for param in model.parameters())
    with pytest.raises(RuntimeError, match="keeps no graph"):
        torch.autograd.grad([model[0].weight.grad], [model[0].weight], [torch.ones(WIDTH, WIDTH)])
    assert float(model[0].weight.grad.detach().norm()) > 0
    with torch.no_grad():
        assert float(model[0].weight.grad.norm()) > 0
    optimizer.step()
    loss_of(model, 1).backward()
    assert float(model[0].weight.grad.norm()) > 0


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise ValueError("a backward that fails")


def test_a_backward_that_fails_leaves_no_graph_behind():
    model = sharded()
    with pytest.raises(ValueError, match="a backward that fails"):
        model(Fails.apply(inputs(0).requires_grad_())).square().sum().backward(create_graph=True)
    model.zero_grad()
    loss_of(model, 1).backward()
    assert all(float(param.grad.norm()) > 0 for param in model.parameters())


def test_data_of_another_parameter_is_told():
    model, other = sharded(), sharded(build(1))
    model[0].weight.data = model[2].weight.data
    with pytest.raises(RuntimeError, match=r"0\.weight was set to that of parameter 2\.weight"):
        model(inputs(0))
    model[0].weight.data, model[2].weight.data = model[2].weight.data, model[0].weight.data
    model(inputs(0))
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        mine.data = theirs.data
    with pytest.raises(RuntimeError, match="a parameter of another sharded model"):
        model(inputs(0))
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        mine.data = theirs.data.clone()
    assert torch.equal(model(inputs(0)), other(inputs(0)))


def test_a_write_to_what_a_parameter_has_a_copy_of_is_told():
    model = sharded()
    flat = torch.cat([param.detach().reshape(-1) for param in model.parameters()])
    at = 0
    for param in model.parameters():
        param.data = flat[at : at + param.numel()].view(param.shape)
        at += param.numel()
    assert torch.equal(model(inputs(0)), build()(inputs(0)))
    flat.mul_(0.5)
    with pytest.raises(RuntimeError, match=r"\.data was set to a tensor that cannot be the parameter itself"):
        model(inputs(0))
    model(inputs(0))


def inserted(model):
    torch.manual_seed(3)
    model.insert(1, module=nn.Linear(WIDTH, WIDTH))
    return model


def test_inserted_modules_are_taken_in():
    assert max(compared(inserted).values()) < 2e-5
    model = inserted(sharded())
    model(inputs(0))
    with unwall.full_params(model[1]):  # which wants parameters that are sharded
        assert model[1].weight.shape == (WIDTH, WIDTH)


def test_a_load_that_torch_cannot_do_changes_nothing():
    model, given = sharded(), build(1).state_dict()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(RuntimeError, match=r"2\.bias: a tensor on the meta device has no values"):
        model.load_state_dict({**given, "2.bias": given["2.bias"].to("meta")})
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        with pytest.raises(RuntimeError, match="load without it"):
            model.load_state_dict(given)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    quantised = torch.quantize_per_tensor(given["2.weight"], 0.1, 0, torch.qint8)  # copied by nobody
    with pytest.raises(RuntimeError, match=r"2\.weight"):
        model.load_state_dict({"2.weight": quantised}, strict=False)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def looks_of_a_loop():
    """How often a loop that keeps all values, and writes to each, makes a rank look whether one was written to."""
    model = sharded(nn.Sequential(*(nn.LayerNorm(2) for _ in range(50))))
    looks, changed = [], lent.Lent.changed
    lent.Lent.changed = property(lambda value: looks.append(1) or changed.fget(value))
    try:
        kept = [param.data for param in model.parameters()]
        for value in kept:
            value.add_(1.0)
        for param in model.parameters():
            param.data = torch.full((2,), 3.0)
    finally:
        lent.Lent.changed = changed
    values = {float(param.detach()[0]) for param in model.parameters()}
    return len(looks), values, {float(value[0]) for value in kept}


def test_values_that_several_ranks_keep_are_not_all_looked_at_with_each_read(ranks):
    for looks, values, kept in ranks(2).run(looks_of_a_loop):
        assert looks < 200 * 25
        assert values == {3.0}
        assert kept == {1.0, 2.0}
