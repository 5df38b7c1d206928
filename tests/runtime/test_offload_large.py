"""Models that never exist whole in memory: built or loaded straight onto the disk, trained there, looked at, taken away."""

import weakref

import pytest
import torch
from letting_go import gone
from offload import (
    DEVICE,
    DISK,
    HOST,
    Setup,
    build,
    differing,
    few_chunks,
    mixed_plan,
    outcome,
    over_budget,
    same_bits,
    shard_near,
    start,
    step,
)

import unwall
from unwall.plans import Plan

SETUP = Setup(clip=0.5, passes=2)


def trained(model, steps=3, first=0, optimizer=None):
    optimizer = optimizer or unwall.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1, max_grad_norm=SETUP.clip)
    for number in range(first, first + steps):
        step(model, optimizer, SETUP, number)
    return optimizer


@pytest.fixture(scope="module")
def expected():
    """What three steps give with everything on the device."""
    model, optimizer = start(SETUP, DEVICE, None)
    trained(model, optimizer=optimizer)
    return outcome(model, optimizer)


def small_host(folder):
    """All states on disk, and the least host memory that this takes."""
    return shard_near(build(), **DISK, disk=folder, host_bytes=1)


def test_a_model_built_inside_init_trains_on_disk_with_the_same_bits(expected, tmp_path):
    plan = Plan(**small_host(str(tmp_path)))
    with unwall.init(plan):
        model = build()
    unwall.shard(model, plan)
    optimizer = trained(model)
    assert over_budget(model) == []
    assert differing(expected, outcome(model, optimizer)) == []


def test_a_meta_model_that_is_loaded_trains_on_disk_with_the_same_bits(expected, tmp_path):
    weights = build().state_dict()
    with torch.device("meta"):
        model = build()
    unwall.shard(model, Plan(**small_host(str(tmp_path))))
    model.load_state_dict(weights)
    optimizer = trained(model)
    assert over_budget(model) == []
    assert differing(expected, outcome(model, optimizer)) == []


def build_both_ways(folder):
    plan = Plan(**DISK, disk=folder)
    with unwall.init(plan):
        first = build()
    with torch.device("meta"):
        second = build()
    weights = build().state_dict()
    results = []
    for model in (first, second):
        unwall.shard(model, plan)
        if model is second:
            model.load_state_dict(weights)
        results.append(outcome(model, trained(model)))
    plain, optimizer = start(SETUP, DEVICE, None)
    trained(plain, optimizer=optimizer)
    return [differing(outcome(plain, optimizer), result) for result in results]


def test_both_ways_with_two_ranks(ranks, tmp_path):
    assert ranks(2).run(build_both_ways, str(tmp_path)) == [[[], []], [[], []]]


def test_state_dict_and_full_params_of_a_model_on_disk(tmp_path):
    model, _ = start(SETUP, DISK, str(tmp_path))
    whole = build().state_dict()
    assert all(same_bits(whole[name], value) for name, value in model.state_dict().items())
    with unwall.full_params(model):
        assert all(same_bits(whole[name], value.detach()) for name, value in model.named_parameters())
    changed = {name: value + 1 for name, value in whole.items()}
    model.load_state_dict(changed)
    assert all(same_bits(changed[name], value) for name, value in model.state_dict().items())
    with unwall.full_params(model, write=True), torch.no_grad():
        model[0].linear.weight.fill_(0.1)
    assert same_bits(model.state_dict()["0.linear.weight"], torch.full((64, 64), 0.1))
    assert same_bits(model.state_dict()["1.linear.weight"], changed["1.linear.weight"])


@pytest.mark.parametrize("target", ["device", "host", "disk", "mixed"])
@few_chunks()
def test_a_checkpoint_of_a_model_on_disk_goes_on_anywhere(target, expected, tmp_path):
    model, optimizer = start(SETUP, DISK, str(tmp_path))
    trained(model, steps=2, optimizer=optimizer)
    weights, states = model.state_dict(), optimizer.state_dict()
    placements = {"device": DEVICE, "host": HOST, "disk": DISK}
    placement = placements.get(target) or mixed_plan(SETUP, str(tmp_path))
    other, resumed = start(SETUP, placement, str(tmp_path))
    other.load_state_dict(weights)
    resumed.load_state_dict(states)
    trained(other, steps=1, first=2, optimizer=resumed)
    assert differing(expected, outcome(other, resumed)) == []


def test_a_checkpoint_of_the_device_goes_on_on_disk(expected, tmp_path):
    model, optimizer = start(SETUP, DEVICE, str(tmp_path))
    trained(model, steps=2, optimizer=optimizer)
    other, resumed = start(SETUP, DISK, str(tmp_path))
    other.load_state_dict(model.state_dict())
    resumed.load_state_dict(optimizer.state_dict())
    trained(other, steps=1, first=2, optimizer=resumed)
    assert differing(expected, outcome(other, resumed)) == []


def test_the_file_goes_with_the_model(tmp_path):
    model, optimizer = start(SETUP, DISK, str(tmp_path))
    trained(model, optimizer=optimizer)
    assert len(list(tmp_path.iterdir())) == 1
    unwall.api.engine(model).finish()  # an update in flight keeps its model
    del model, optimizer
    assert gone(lambda: not list(tmp_path.iterdir()))


@pytest.mark.parametrize("placement", [DEVICE, HOST, DISK], ids=["device", "host", "disk"])
def test_a_forward_without_backward_keeps_nothing(placement, tmp_path):
    """As in evaluation without ``no_grad``: what the pass kept for backward goes with its output."""
    model, optimizer = start(SETUP, placement, str(tmp_path))
    trained(model, steps=1, optimizer=optimizer)
    kept = []
    model[5].linear.register_forward_hook(lambda module, args, output: kept.append(weakref.ref(args[0])))
    for _ in range(3):
        model(torch.randn(8, 64))
    assert gone(lambda: [activation() for activation in kept] == [None, None, None])


@pytest.mark.parametrize("placement", [HOST, DISK], ids=["host", "disk"])
def test_the_engine_goes_with_a_model_whose_last_pass_had_no_backward(placement, tmp_path):
    model, optimizer = start(SETUP, placement, str(tmp_path))
    model(torch.randn(8, 64))
    engine = weakref.ref(unwall.api.engine(model))
    del model, optimizer
    assert gone(lambda: engine() is None)
