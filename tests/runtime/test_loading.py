"""Loading: everything is looked at before anything changes, and the ranks are given the same."""

import copy

import pytest
import torch
from models import NestedNet, NormNet
from ranks import rank_and_world
from reference import FP32, assert_equal, mse, seeded, unwall_adamw, vectors, whole_state
from torch import nn

import unwall
from unwall.plans import Plan

TIERS = {"device": {}, "host": {"params": "host", "optimizer": "host"}, "disk": {"params": "disk", "optimizer": "disk"}}


def other():
    return seeded(NestedNet, seed=7).state_dict()


def wrong_shape(state):
    state["tail.0.weight"] = torch.zeros(3, 3)


def wrong_size_that_broadcasts(state):
    state["tail.0.bias"] = torch.zeros(1)


def missing(state):
    del state["tail.0.bias"]


def unexpected(state):
    state["tail.9.bias"] = torch.zeros(3)


WRONG = {
    wrong_shape: r"size mismatch for tail\.0\.weight",
    wrong_size_that_broadcasts: r"size mismatch for tail\.0\.bias",
    missing: r"Missing key\(s\) in state_dict: 'tail\.0\.bias'",
    unexpected: r"Unexpected key\(s\) in state_dict: 'tail\.9\.bias'",
}


def failed_load(change, message, only_on):
    """A load that must fail on every rank, on whichever of them the state dict is wrong, and change nothing."""
    model = seeded(NestedNet)
    unwall.shard(model, FP32)
    state = other()
    if only_on in (None, rank_and_world()[0]):
        change(state)
    with pytest.raises(RuntimeError, match=message):
        model.load_state_dict(state)
    return whole_state(model)


@pytest.mark.parametrize("change", WRONG)
def test_a_load_that_fails_changes_nothing(ranks, change):
    assert_equal(seeded(NestedNet).state_dict(), failed_load(change, WRONG[change], None))
    assert_equal(seeded(NestedNet).state_dict(), ranks(2).run(failed_load, change, WRONG[change], 0)[0])


def lenient_load():
    model = seeded(NestedNet)
    unwall.shard(model, FP32)
    state = other()
    missing(state)
    unexpected(state)
    keys = model.load_state_dict(state, strict=False)
    plain = seeded(NestedNet)
    assert keys == plain.load_state_dict(state, strict=False)
    wrong_shape(state)
    with pytest.raises(RuntimeError, match=r"size mismatch for tail\.0\.weight"):
        model.load_state_dict(state, strict=False)
    return whole_state(model), plain.state_dict()


@pytest.mark.parametrize("world", [1, 2])
def test_strict_false_means_what_it_means_in_pytorch(ranks, world):
    got, expected = ranks(world).run(lenient_load)[0]
    assert_equal(expected, got)


def load_by_rank(how, tier, folder, dtype):
    rank, _ = rank_and_world()
    model = seeded(NormNet)
    unwall.shard(model, Plan(compute_dtype=dtype, disk=folder if tier == "disk" else None, **TIERS[tier]))
    state = seeded(NormNet, seed=7).state_dict()
    if how == "only rank 0 has tensors" and rank:
        state = {}
    if how == "half of it" and rank:
        state = dict(list(state.items())[::2])
    if how == "other values" and rank:
        state[next(iter(state))] = state[next(iter(state))].flip(0)
    if how == "other values":
        with pytest.raises(RuntimeError, match="rank 1 was given other values than rank 0"):
            model.load_state_dict(state)
    else:
        model.load_state_dict(state)
    buffers = {name: value.clone() for name, value in model.named_buffers()}
    for _, buffer in model.named_buffers():  # as running statistics do, they differ by rank
        buffer.add_(rank)
    model.load_state_dict(model.state_dict())
    assert rank == 0 or not any(torch.equal(value, buffers[name]) for name, value in model.named_buffers())
    return whole_state(model), buffers


@pytest.mark.parametrize("how", ["only rank 0 has tensors", "half of it", "other values"])
@pytest.mark.parametrize(("tier", "dtype"), [("device", torch.bfloat16), ("host", torch.float32), ("disk", torch.bfloat16)])
def test_ranks_that_are_given_different_tensors(ranks, tmp_path, tier, dtype, how):
    """Rank 0's count for what the others were not given; values that differ are an error, and nothing changes."""
    (state, _), (_, buffers) = ranks(2).run(load_by_rank, how, tier, tmp_path, dtype)
    plain = seeded(NormNet, seed=0 if how == "other values" else 7)
    assert_equal(plain.state_dict(), state)
    assert_equal(dict(plain.named_buffers()), buffers)


class Renamed(nn.Linear):
    """Reads files in which its weight has another name."""

    def _load_from_state_dict(self, state_dict, prefix, *rest):
        if prefix + "kernel" in state_dict:
            state_dict[prefix + "weight"] = state_dict.pop(prefix + "kernel")
        super()._load_from_state_dict(state_dict, prefix, *rest)


def test_modules_that_read_in_a_way_of_their_own():
    model = nn.Sequential(nn.Linear(4, 4), Renamed(4, 4))
    state = {name.replace("1.weight", "1.kernel"): torch.ones_like(value) for name, value in model.state_dict().items()}
    unwall.shard(model, FP32)
    with pytest.raises(RuntimeError, match="Missing key"):
        model.load_state_dict({})
    with pytest.raises(RuntimeError, match="Missing key"):
        model.load_state_dict({name: value for name, value in state.items() if name != "1.bias"})
    model.load_state_dict(state)
    assert all((value == 1).all() for value in model.state_dict().values())


def test_a_bf16_model_takes_fp32_values_in_full():
    model = nn.Linear(4, 4).to(torch.bfloat16)
    unwall.shard(model)
    values = {"weight": torch.rand(4, 4), "bias": torch.rand(4)}
    model.load_state_dict(values)
    engine = unwall.api.engine(model)
    found = unwall.runtime.whole.read_master(engine.groups[0])
    assert {float(value) for value in values["weight"].flatten()} <= {float(value) for value in found}


def test_a_scalar_parameter_takes_one_element_as_in_pytorch():
    model = nn.Module()
    model.scale = nn.Parameter(torch.tensor(2.0))
    unwall.shard(model, Plan(params="host", optimizer="host"))
    model.load_state_dict({"scale": torch.tensor([3.0])})
    assert model.state_dict()["scale"].item() == 3


def trained(make):
    model = seeded(NestedNet)
    unwall.shard(model, FP32)
    optimizer = make(model)
    torch.manual_seed(0)
    mse(model, vectors()).backward()
    optimizer.step()
    return model, optimizer


def wrapped(model):
    return unwall.wrap(torch.optim.Adam(model.parameters(), lr=1e-2))


WRONG_STATES = {
    "a wrong size": lambda entry, group: entry.update(exp_avg_sq=torch.zeros(2, 2)),
    "one element": lambda entry, group: entry.update(exp_avg=torch.ones(1)),
    "a missing state": lambda entry, group: entry.pop("exp_avg"),
    "not a number": lambda entry, group: entry["exp_avg"].view(-1)[3:4].fill_(float("nan")),
    "no steps": lambda entry, group: entry.update(step=torch.tensor(-1.0)),
    "a word": lambda entry, group: group.update(lr="x"),
    "a learning rate that is none": lambda entry, group: group.update(lr=float("nan")),
    "a missing option": lambda entry, group: group.pop("betas"),
    "one beta": lambda entry, group: group.update(betas=(0.9,)),
    "fewer parameters": lambda entry, group: group["params"].pop(),
}


@pytest.mark.parametrize("make", [unwall_adamw, wrapped])
def test_an_optimizer_state_is_loaded_again_and_again(make):
    _, optimizer = trained(make)
    for _ in range(3):
        optimizer.load_state_dict(optimizer.state_dict())


@pytest.mark.parametrize("make", [unwall_adamw, wrapped])
@pytest.mark.parametrize("what", [*WRONG_STATES, "another parameter", "another loss scale", "no groups"])
def test_a_wrong_optimizer_state_changes_nothing(make, what):
    _, optimizer = trained(make)
    before = optimizer.state_dict()
    state = copy.deepcopy(optimizer.state_dict())
    state["param_groups"][0]["lr"] = 5.0
    for entry in state["state"].values():
        entry["step"] = torch.tensor(9.0)
    last = max(state["state"])
    if what in WRONG_STATES:
        WRONG_STATES[what](state["state"][last], state["param_groups"][0])
    elif what == "another parameter":
        state["state"][last + 100] = state["state"][last]
    elif what == "another loss scale":
        state["scaler"] = {"scale": 0.0, "good_steps": 0}
    else:
        state["param_groups"] = []
    with pytest.raises(ValueError, match="the optimizer state"):
        optimizer.load_state_dict(state)
    after = optimizer.state_dict()
    assert after["param_groups"] == before["param_groups"]
    for number, entry in before["state"].items():
        assert_equal(
            {name: entry[name] for name in entry if name != "inner"},
            {name: after["state"][number][name] for name in entry if name != "inner"},
        )
