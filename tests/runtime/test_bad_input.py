"""What cannot work is refused with an error that says what to do."""

import copy
import io
import pickle
from contextlib import ExitStack
from functools import partial

import pytest
import torch
from models import NestedNet, TiedNet
from reference import FP32, ON_DEVICE, assert_equal, mse, seeded, unwall_adamw, vectors
from torch import nn

import unwall
from unwall.plans import Plan, PlanError

REFUSED = (ValueError, RuntimeError)


@pytest.fixture
def sharded():
    return unwall.shard(seeded(NestedNet), FP32)


def test_shard_gives_the_model_back():
    model = NestedNet()
    assert unwall.shard(model, FP32) is model


def test_a_model_that_is_already_sharded(sharded):
    with pytest.raises(REFUSED, match="already"):
        unwall.shard(sharded, FP32)


def test_a_part_of_a_sharded_model(sharded):
    with pytest.raises(REFUSED, match="already"):
        unwall.shard(sharded.stages[0], FP32)


def test_a_model_with_a_sharded_part_is_refused_by_the_name_of_the_part(sharded):
    outer = nn.ModuleDict({"head": nn.Linear(4, 4), "body": sharded})
    with pytest.raises(REFUSED, match=r"body.*already|already.*body"):
        unwall.shard(outer, FP32)


def test_parameters_on_different_devices():
    model = NestedNet()
    model.tail.to("meta")
    with pytest.raises(REFUSED, match=r"device.*tail|tail.*device"):
        unwall.shard(model, FP32)


def test_something_that_is_not_a_module():
    with pytest.raises((TypeError, ValueError), match="Module"):
        unwall.shard([nn.Linear(2, 2)], FP32)


@pytest.mark.parametrize("stage", [0, 3])
def test_a_plan_that_cannot_fit_is_refused_before_anything_happens(stage):
    model = seeded(NestedNet)
    plan = Plan(stage=stage, compute_dtype=torch.float32, **ON_DEVICE, device_bytes="1KiB")
    with pytest.raises(PlanError, match=r"device_bytes.*Plan\(") as refusal:
        unwall.shard(model, plan)
    assert "1" in str(refusal.value)
    assert "KiB" in str(refusal.value)  # what was asked for
    assert_equal(seeded(NestedNet).state_dict(), model.state_dict())
    mse(model, vectors()).backward()  # as plain as before
    assert all(parameter.grad is not None for parameter in model.parameters())
    unwall.shard(model.zero_grad() or model, FP32)  # and still ready to be sharded


def test_the_plan_offered_instead_fits():
    model = seeded(NestedNet)
    with pytest.raises(PlanError) as refusal:
        unwall.shard(model, Plan(compute_dtype=torch.float32, **ON_DEVICE, device_bytes="1KiB"))
    text = str(refusal.value)
    offered = text[text.index("Plan(") :]
    offered = offered[: offered.index(")") + 1]
    plan = eval(offered, {"Plan": Plan, "torch": torch})
    unwall.shard(model, plan)


def test_an_optimizer_before_sharding():
    model = NestedNet()
    with pytest.raises(REFUSED, match=r"unwall\.shard"):
        unwall_adamw(model)


def test_a_wrapped_optimizer_before_sharding():
    model = NestedNet()
    with pytest.raises(REFUSED, match=r"unwall\.shard"):
        unwall.wrap(torch.optim.SGD(model.parameters(), lr=0.1))


def test_an_optimizer_over_a_model_that_is_not_sharded(sharded):
    other = nn.Linear(4, 4)
    with pytest.raises(REFUSED, match="shard"):
        unwall.AdamW([*sharded.parameters(), *other.parameters()], lr=0.1)


def test_a_plain_torch_optimizer_over_a_sharded_model_does_not_pass_in_silence(sharded):
    """Gradients are in the shards, not in .grad: torch.optim alone would do nothing, and nobody would know."""
    optimizer = torch.optim.SGD(sharded.parameters(), lr=0.1)
    mse(sharded, vectors()).backward()
    with pytest.raises(REFUSED, match=r"unwall\.(wrap|AdamW)"):
        optimizer.step()


@pytest.mark.parametrize("make", [pickle.dumps, lambda model: torch.save(model, io.BytesIO())], ids=["pickle", "save"])
def test_copies_of_a_sharded_model(sharded, make):
    with pytest.raises((*REFUSED, TypeError, pickle.PicklingError), match="state_dict"):
        make(sharded)


@pytest.mark.parametrize("convert", [nn.Module.double, nn.Module.half, partial(nn.Module.to, device="meta")])
def test_converting_a_sharded_model(sharded, convert):
    """It would convert the placeholders, not the shards: refused, or else everything goes wrong later and in silence."""
    with pytest.raises(REFUSED, match="shard"):
        convert(sharded)


def test_copies_of_a_model_that_is_not_sharded_still_work():
    unwall.shard(NestedNet(), FP32)
    plain = NestedNet()
    assert_equal(plain.state_dict(), copy.deepcopy(plain).state_dict())


def test_stats_and_full_params_of_a_plain_model():
    with pytest.raises(REFUSED, match=r"unwall\.shard"):
        unwall.stats(NestedNet())
    with pytest.raises(REFUSED, match=r"unwall\.shard"):
        with unwall.full_params(NestedNet()):
            pass
    with pytest.raises(REFUSED, match=r"unwall\.shard"):
        with unwall.no_sync(NestedNet()):
            pass


def test_an_in_place_write_outside_full_params_says_so():
    """A released parameter cannot be written; with one rank it may be whole, and then the write counts."""
    model = seeded(TiedNet)
    unwall.shard(model, FP32)
    weight = next(model.parameters())
    before = model.state_dict()["embed.weight"].clone()
    try:
        with torch.no_grad():
            weight.add_(1.0)
    except RuntimeError:
        return
    assert torch.equal(model.state_dict()["embed.weight"], before + 1.0)


@pytest.mark.parametrize("use", [unwall.stats, unwall.profile, unwall.no_sync, partial(unwall.export_weights, path="w")])
@pytest.mark.parametrize("thing", [None, "model", [1]])
def test_something_else_in_the_place_of_a_model(use, thing):
    with pytest.raises(TypeError, match=rf"expected a.* model .*got {type(thing).__name__}"):
        ExitStack().enter_context(use(thing))


@pytest.mark.parametrize("given", [[None], {"a": 1}, b"y", [()], [[1.0]]])
def test_something_else_in_the_place_of_parameters(given):
    with pytest.raises(TypeError, match="an optimizer takes the parameters of a sharded model, got "):
        unwall.AdamW(given)


@pytest.mark.parametrize("given", [None, [], {}, {"params": 1}, {"lr": 1.0}])
def test_something_else_in_the_place_of_a_param_group(sharded, given):
    optimizer = unwall.AdamW(sharded.parameters())
    with pytest.raises(TypeError, match="a param group is a dict with the parameters under 'params', got "):
        optimizer.add_param_group(given)
