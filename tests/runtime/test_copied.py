"""Copies of a sharded model and of its modules: plain ones with whole values, as ``copy.deepcopy`` gives them in PyTorch."""

import copy

import pytest
import torch
from models import CASES, NestedNet
from reference import mse, seeded, vectors
from torch import nn
from torch.optim.swa_utils import AveragedModel

import unwall
from unwall.plans import Plan

TIERS = {"device": {}, "host": {"params": "host", "optimizer": "host"}, "disk": {"params": "disk", "optimizer": "disk"}}
CLOSE = {"rtol": 1e-4, "atol": 1e-5}


def sharded(model, tier, folder, dtype=torch.float32, **fields):
    return unwall.shard(model, Plan(compute_dtype=dtype, disk=str(folder), **TIERS[tier], **fields))


def batch(seed):
    torch.manual_seed(seed)
    return vectors()


def train(model, optimizer, steps, start=0):
    for step in range(start, start + steps):
        mse(model, batch(step)).backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("name", CASES)
def test_a_deep_copy_is_a_plain_model(name):
    case = CASES[name]
    plain = seeded(case.build)
    model = sharded(seeded(case.build), "host", None, activations="recompute" if name == "NestedNet" else "keep")
    copied = copy.deepcopy(model)
    assert {name: type(value) for name, value in copied.named_parameters()} == dict.fromkeys(
        dict(plain.named_parameters()), nn.Parameter
    )
    for module, other in zip(copied.modules(), plain.modules(), strict=True):
        assert type(module).__name__ == type(other).__name__
        assert set(module.__dict__) <= set(other.__dict__) | {"_compiled_call_impl"}
        assert not module._forward_hooks or other._forward_hooks
        assert not module._state_dict_hooks or other._state_dict_hooks
    assert [key for key, _ in copied.named_parameters(remove_duplicate=False)] == [
        key for key, _ in plain.named_parameters(remove_duplicate=False)
    ]
    losses = []
    for each in (plain, copied):
        torch.manual_seed(1)
        loss = case.loss(each, case.batch())
        loss.backward()
        losses.append(loss.detach())
    assert torch.equal(*losses)
    copied.load_state_dict(copy.deepcopy(copied).state_dict())
    torch.optim.SGD(copied.parameters(), lr=0.1).step()  # an optimizer of torch, as it is no part of the sharded model
    unwall.shard(copied, Plan(compute_dtype=torch.float32))  # and may be sharded itself


class Knot(nn.Module):
    """Refers to itself, to a child past the modules, and has hooks and a forward of the user's."""

    def __init__(self):
        super().__init__()
        self.child = nn.Linear(16, 16)
        self.child.__dict__["parent"] = self
        self.__dict__["again"] = [self.child, self]
        self.seen = []
        self.child.register_forward_hook(lambda *_: _SEEN.append("forward"))
        plain = self.child.forward
        self.child.forward = lambda x: 2 * plain(x)

    def forward(self, x):
        return self.child(x)


_SEEN = []


def test_what_the_user_has_put_on_modules_is_copied():
    plain, model = seeded(Knot), sharded(seeded(Knot), "host", None)
    copied = copy.deepcopy(model)
    assert copied.child.parent is copied
    assert copied.again[0] is copied.child
    assert copied.again[1] is copied
    _SEEN.clear()
    x = torch.ones(2, 16)
    assert torch.equal(copied(x), plain(x))
    assert _SEEN == ["forward"] * 2


def averaged(tier, folder, dtype):
    """An average that is built after ``shard``, a submodule that is copied and put back, and training after that."""
    plain, model = seeded(NestedNet).to(dtype), seeded(NestedNet).to(dtype)
    sharded(model, tier, folder, dtype)
    results = []
    for each, kind in ((plain, torch.optim.SGD), (model, lambda params, lr: unwall.wrap(torch.optim.SGD(params, lr=lr)))):
        torch.manual_seed(0)
        average = AveragedModel(each)
        optimizer = kind(each.parameters(), lr=0.1)
        for step in range(2):
            inputs, target = batch(step)
            (each(inputs.to(dtype)).float() - target).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            average.update_parameters(each)
        each.tail[0] = copy.deepcopy(each.tail[0])
        with torch.no_grad():
            each.tail[0].weight.mul_(0.5)
        optimizer = kind(each.parameters(), lr=0.1)
        inputs, target = batch(3)
        (each(inputs.to(dtype)).float() - target).square().mean().backward()
        optimizer.step()
        results.append([value.detach().clone() for value in (*average.module.parameters(), *each.parameters())])
    assert all(type(value) is nn.Parameter for value in average.module.parameters())
    return results


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_averages_and_copied_modules(ranks, tmp_path, world, dtype):
    for tier in TIERS if world == 1 else ("disk",):
        expected, got = ranks(world).run(averaged, tier, tmp_path, dtype)[0]
        close = CLOSE if dtype is torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
        for one, other in zip(expected, got, strict=True):
            torch.testing.assert_close(other, one, **close)


@pytest.mark.parametrize("tier", TIERS)
def test_a_shallow_copy_is_a_module_of_its_own_with_the_same_parameters(tier, tmp_path):
    model = sharded(seeded(NestedNet), tier, tmp_path)
    plain = seeded(NestedNet)
    for each in (plain, model):
        copied = copy.copy(each.tail[0])
        assert copied.weight is each.tail[0].weight
        copied.forward = lambda x: x
        assert torch.equal(copied(torch.ones(1, 16)), torch.ones(1, 16))
    copied = copy.copy(model)
    assert torch.equal(copied(batch(0)[0]), plain(batch(0)[0]))
    mse(copied, batch(0)).backward()
    mse(plain, batch(0)).backward()
    unwall.wrap(torch.optim.SGD(copied.parameters(), lr=0.1)).step()
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    for one, other in zip(plain.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(other.detach(), one.detach(), **CLOSE)
    assert copied.state_dict().keys() == plain.state_dict().keys()
    copied.load_state_dict(plain.state_dict())
    with pytest.raises(RuntimeError, match="shallow copy"):
        copied.half()
