"""A parameter may lie in several slots, of one group or of several: its values, gradients and states go to the right ranges."""

from functools import partial

import pytest
import torch
from ranks import rank_and_world
from torch import nn

import unwall
from unwall.plans import Plan
from unwall.runtime.assemble import assemble
from unwall.runtime.resources import open_tiers, room_on
from unwall.shards.build import smallest
from unwall.shards.collectives import Ranks
from unwall.tiers.device import DeviceTier

PLACEMENTS = {
    "device": {"params": "device", "optimizer": "device"},
    "host": {"params": "host", "optimizer": "host"},
    "disk": {"params": "disk", "grads": "disk", "optimizer": "disk"},
}
CUTS = {"0.weight": [64 * 96, 64 * 200 + 7]}
"""At the border of a row, and in the middle of one."""


def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 300), nn.Linear(300, 8))


def cut_model(plan):
    model = build()
    device = DeviceTier(torch.device("cpu"), plan.budget_device_bytes)
    ranks = Ranks(torch.distributed.group.WORLD if rank_and_world()[1] > 1 else None, "cpu")
    room = smallest(ranks.every(room_on(device.device, plan)))
    tiers = partial(open_tiers, plan, device, ranks.rank)
    assemble(model, plan, ranks, room, tiers, lambda param: param.data, lambda name, _: CUTS.get(name, ()))
    return model


def give_gradients(model, seed):
    """What backward of a tiled operator would do: each slot takes its range of the whole gradient."""
    engine = unwall.api.engine(model)
    generator = torch.Generator().manual_seed(seed)
    for param in model.parameters():
        places = engine.places[id(param)]
        slot = engine.groups[places[0].group].layout.slots[places[0].slot]
        grad = torch.randn(slot.shape, generator=generator)
        for place in places:
            engine.gradients[place.group].take(place.slot, grad)
    for index in range(len(engine.groups)):
        engine.executor.reduce(index)


def trained(stage, placement, folder, make):
    model = cut_model(Plan(stage=stage, compute_dtype=torch.float32, disk=folder, **PLACEMENTS[placement]))
    places = unwall.api.engine(model).places[id(model[0].weight)]
    optimizer = make(model.parameters())
    for step in range(3):
        give_gradients(model, step)
        optimizer.step()
        optimizer.zero_grad()
    states = optimizer.state_dict()["state"]
    # Everything goes out and comes in again.
    values = model.state_dict()
    again = cut_model(Plan(stage=stage, compute_dtype=torch.float32, disk=folder, **PLACEMENTS[placement]))
    whole = {name: torch.empty(value.shape) for name, value in build().state_dict().items()}
    for name, value in whole.items():
        if rank_and_world()[0] == 0:
            value.copy_(values[name])
        if rank_and_world()[1] > 1:
            torch.distributed.broadcast(value, 0)
    again.load_state_dict(whole)
    resumed = make(again.parameters())
    resumed.load_state_dict({**optimizer.state_dict(), "state": states})
    give_gradients(again, 3)
    resumed.step()
    with unwall.full_params(again):
        after = {name: param.detach().clone() for name, param in again.named_parameters()}
    return len(places), values, states, after


def plain(make):
    model = build()
    optimizer = make(model.parameters())
    for step in range(4):
        generator = torch.Generator().manual_seed(step)
        for param in model.parameters():
            param.grad = torch.randn(param.shape, generator=generator)
        optimizer.step()
        if step == 2:
            values = {name: value.clone() for name, value in model.state_dict().items()}
            steps = {number: entry["exp_avg"].clone() for number, entry in optimizer.state_dict()["state"].items()}
    return values, steps, model.state_dict()


def adamw(params):
    return unwall.AdamW(params, lr=1e-2)


def wrapped(params):
    return unwall.wrap(torch.optim.AdamW(params, lr=1e-2))


@pytest.mark.parametrize("make", [adamw, wrapped])
@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize(("world", "stage"), [(1, 3), (2, 1), (2, 3)])
def test_a_parameter_in_several_slots_is_trained_saved_and_loaded(world, stage, placement, make, ranks, tmp_path):
    expected, moments, after = plain(lambda params: torch.optim.AdamW(params, lr=1e-2))
    results = ranks(world).run(trained, stage, placement, str(tmp_path), make)
    places, values, states, final = results[0]
    assert places == 3
    for name, value in expected.items():
        torch.testing.assert_close(values[name], value, rtol=1e-5, atol=1e-6)
    for number, moment in moments.items():
        torch.testing.assert_close(states[number]["exp_avg"], moment, rtol=1e-5, atol=1e-6)
        assert int(states[number]["step"]) == 3
    for *_, final in results:
        for name, value in after.items():
            torch.testing.assert_close(final[name], value, rtol=1e-5, atol=1e-6)


def test_a_forward_that_needs_such_a_parameter_whole_says_so():
    model = cut_model(Plan(compute_dtype=torch.float32))
    with pytest.raises(RuntimeError, match=r"0\.weight lies in 3 slots"):
        model(torch.randn(2, 64))


@pytest.mark.parametrize("cuts", [[0], [64 * 300], [5, 5], [9, 3]])
def test_cuts_outside_a_parameter_are_refused(cuts):
    from unwall.shards.build import plan_groups

    with pytest.raises(ValueError, match=r"0\.weight has 19200 elements and cannot be cut at"):
        plan_groups(build(), Plan(), 1, lambda name, _: cuts if name == "0.weight" else ())
