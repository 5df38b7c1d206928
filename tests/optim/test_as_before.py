"""What a step knows from the step before holds only as long as nothing has changed."""

import copy
import weakref
from dataclasses import replace

import pytest
import torch
from letting_go import gone
from torch import nn

import unwall
from unwall.plans import Plan

WIDTH = 8
PLAN = Plan(params="device", optimizer="device", compute_dtype=torch.float32)


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 2))


def groups_of(model):
    """Weights and biases apart."""
    weights = [param for param in model.parameters() if param.dim() > 1]
    return [{"params": weights}, {"params": [p for p in model.parameters() if p.dim() == 1], "weight_decay": 0.0}]


def both():
    """A sharded model and a plain one, each with its optimizer."""
    plain, model = net(), unwall.shard(net(), PLAN)
    return [
        (model, unwall.AdamW(groups_of(model), lr=1e-2, weight_decay=0.1)),
        (plain, torch.optim.AdamW(groups_of(plain), lr=1e-2, weight_decay=0.1)),
    ]


def step(model, optimizer, number, used=slice(None)):
    x = torch.linspace(-1, 1, 4 * WIDTH).view(4, WIDTH) * (number + 1)
    for layer in model[used]:
        x = layer(x)
    x.square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def rates(model, optimizer):
    optimizer.param_groups[0]["lr"] = 3e-3


def alike(model, optimizer):
    """Two groups that had other numbers have the same, then others again."""
    optimizer.param_groups[0]["weight_decay"] = 0.0


def swapped(model, optimizer):
    """Parameters change their group."""
    first, second = optimizer.param_groups
    first["params"][0], second["params"][0] = second["params"][0], first["params"][0]


def taken_out(model, optimizer):
    del optimizer.param_groups[0]["params"][1]


def frozen(model, optimizer):
    model[2].weight.requires_grad_(False)


def counted_anew(model, optimizer):
    """The steps of one parameter are set by hand."""
    steps = optimizer.state[model[0].weight]
    steps["step"] = torch.tensor(1.0) if isinstance(steps["step"], torch.Tensor) else 1


def loaded(model, optimizer):
    """In a new list of new dictionaries."""
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


CHANGES = [rates, alike, swapped, taken_out, frozen, counted_anew, loaded]


@pytest.mark.parametrize("change", CHANGES, ids=[change.__name__ for change in CHANGES])
def test_a_change_between_two_steps_counts(change):
    (model, ours), (plain, theirs) = both()
    for number in range(6):
        for each, optimizer in ((model, ours), (plain, theirs)):
            if number == 3:
                change(each, optimizer)
            step(each, optimizer, number)
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], value, rtol=1e-5, atol=1e-6)


def test_parameters_that_were_updated_more_often_than_others():
    (model, ours), (plain, theirs) = both()
    for number in range(8):
        used = slice(2, None) if number in (1, 4, 5) else slice(None)
        step(model, ours, number, used)
        step(plain, theirs, number, used)
    assert {ours.state[param]["step"] for param in model.parameters()} == {5, 8}
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], value, rtol=1e-5, atol=1e-6)


def test_states_that_move_between_steps_are_the_ones_that_are_updated():
    model, other = (unwall.shard(net(), PLAN) for _ in range(2))
    pairs = [(each, unwall.AdamW(each.parameters(), lr=1e-2)) for each in (model, other)]
    for number in range(6):
        for pair in pairs:
            step(*pair, number)
        away = "host" if number % 2 else "device"
        unwall.move(model, replace(PLAN, optimizer=away, params=away))
    assert all(torch.equal(value, other.state_dict()[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("make", [unwall.AdamW, lambda params: unwall.wrap(torch.optim.SGD(params, lr=0.1, momentum=0.9))])
def test_an_optimizer_keeps_no_model_and_no_states(make):
    model = unwall.shard(net(), PLAN)
    optimizer = make(model.parameters())
    step(model, optimizer, 0)
    engine = unwall.api.engine(model)
    stores = [weakref.ref(store) for group in engine.groups for store in group.states.values()]
    kept, ledger = weakref.ref(model), engine.tiers.device.ledger
    assert stores
    assert ledger.live_bytes
    del model, engine
    assert gone(lambda: all(ref() is None for ref in (kept, *stores)))
    assert ledger.live_bytes == 0
    assert optimizer.param_groups


@pytest.mark.parametrize("way", ["pop", "popitem"])
def test_states_cannot_be_taken_out_one_by_one(way):
    model = unwall.shard(net(), PLAN)
    optimizer = unwall.AdamW(model.parameters())
    step(model, optimizer, 0)
    with pytest.raises(RuntimeError, match="states of a sharded model live in shards"):
        optimizer.state.pop(model[0].weight) if way == "pop" else optimizer.state.popitem()


def test_a_parameter_of_another_model_put_into_a_group_by_hand():
    model, other = (unwall.shard(net(), PLAN) for _ in range(2))
    optimizer = unwall.AdamW(model.parameters())
    step(model, optimizer, 0)
    optimizer.param_groups[0]["params"][1] = other[0].bias
    with pytest.raises(RuntimeError, match="another sharded model was put into optimizer"):
        step(model, optimizer, 1)
