"""Checkpoints of lean states: a resumed run gives the bits of an undisturbed one, and exact and lean states exchange them."""

import pytest
import torch
from early_tools import DEVICE, HOST, on_disk, outcome, start, steps

import unwall


def differing(expected, got):
    return [name for name in expected if not torch.equal(expected[name], got[name])]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Three steps, saved, and two more."""
    folder = tmp_path_factory.mktemp("lean")
    model, optimizer = start(HOST, states="lean")
    steps(model, optimizer, 3)
    at_save = outcome(model, optimizer)
    unwall.save(folder / "lean", model, optimizer)
    steps(model, optimizer, 2, first=3)
    return folder / "lean", at_save, outcome(model, optimizer)


@pytest.mark.parametrize("tier", ["device", "host", "disk"])
def test_a_resumed_run_gives_the_same_bits(saved, tier, tmp_path):
    path, at_save, undisturbed = saved
    plan = {"device": DEVICE, "host": {**HOST, "states": "lean"}, "disk": on_disk(tmp_path)}[tier]
    model, optimizer = start(plan, states="lean")
    steps(model, optimizer, 1, first=7)  # it has states already: they go
    unwall.load(path, model, optimizer)
    assert differing(at_save, outcome(model, optimizer)) == []
    steps(model, optimizer, 2, first=3)
    assert differing(undisturbed, outcome(model, optimizer)) == []
    if tier == "disk":
        unwall.save(tmp_path / "again", model, optimizer)
        other, loaded = start(DEVICE, states="lean")
        unwall.load(tmp_path / "again", other, loaded)
        assert differing(undisturbed, outcome(other, loaded)) == []


def test_exact_states_take_what_lean_ones_saved(saved):
    path, at_save, _ = saved
    model, optimizer = start(HOST)
    unwall.load(path, model, optimizer)
    assert differing(at_save, outcome(model, optimizer)) == []


def test_lean_states_take_what_exact_ones_saved(tmp_path):
    model, optimizer = start(HOST)
    steps(model, optimizer, 3)
    unwall.save(tmp_path / "exact", model, optimizer)
    expected = outcome(model, optimizer)
    other, loaded = start(HOST, states="lean")
    unwall.load(tmp_path / "exact", other, loaded)
    got = outcome(other, loaded)
    for name, value in expected.items():
        if name.endswith("weight"):
            assert float((got[name] - value).abs().max()) <= 2.0**-15 * float(value.abs().max())
        elif name.endswith("exp_avg_sq"):
            assert float((got[name].sqrt() - value.sqrt()).norm()) <= float(value.sqrt().norm()) / 32
        elif name.endswith("exp_avg"):
            assert float((got[name] - value).norm()) <= float(value.norm()) / 8
    steps(other, loaded, 1, first=3)


@pytest.mark.parametrize("first", [True, False])
def test_frozen_parameters_on_disk_keep_their_whole_master(first, tmp_path):
    """They are exact: beside the lean ones two widths of remainders are loaded."""
    fields = {"params": "disk", "optimizer": "disk", "disk": tmp_path, "states": "lean"}

    def sharded(seed):
        torch.manual_seed(seed)
        model = torch.nn.Sequential(torch.nn.Linear(48, 64), torch.nn.Linear(64, 48))
        model[0 if first else 1].requires_grad_(False)
        unwall.shard(model, unwall.Plan(**fields))
        return model, unwall.AdamW(model.parameters(), lr=1e-3)

    model, optimizer = sharded(0)
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    unwall.save(tmp_path / "saved", model, optimizer)
    other, loaded = sharded(1)
    unwall.load(tmp_path / "saved", other, loaded)
    assert differing(expected, other.state_dict()) == []
