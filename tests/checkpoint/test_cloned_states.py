"""Saves beside training of states on a file system that shares extents: no update waits for them."""

import pytest
from checkpoint_tools import TIERS, Setup, begin, differing, everything, momentum, run, step
from reflinks import KINDS, sharing
from test_beside_training import Gate

import unwall
from unwall.checkpoint.stream import OutStream


@pytest.fixture
def gate(monkeypatch):
    found = Gate(monkeypatch)
    yield found
    found.open.set()


@pytest.fixture(params=KINDS)
def folder(request, tmp_path, monkeypatch):
    with sharing(request.param, tmp_path, monkeypatch) as made:
        yield made


@pytest.mark.parametrize("optimizer", [None, momentum])
def test_updates_in_place_wait_for_nothing_and_the_snapshot_is_whole(folder, tmp_path, gate, optimizer):
    setup = Setup(blocks=4, frozen=True, speculate=False)
    model, trained = begin(setup, TIERS["disk"], folder, optimizer)
    for number in range(2):
        step(model, trained, setup, number)
    at_save = everything(model, trained)
    live = unwall.api.engine(model).tiers.disk.ledger.live_bytes
    pending = unwall.save(tmp_path / "saved", model, trained, block=False)
    for number in range(2, 4):
        step(model, trained, setup, number)
    after = everything(model, trained)
    assert gate.waited == []
    assert not pending.done()
    assert differing(at_save, after) != []
    gate.open.set()
    pending.wait()
    assert unwall.api.engine(model).tiers.disk.ledger.live_bytes == live
    options = {"speculate": False, "optimizer": optimizer}
    assert differing(at_save, run(folder, "disk", 2, 2, load=tmp_path / "saved", **options)[0]) == []
    assert differing(after, run(folder, "disk", 2, 4, load=tmp_path / "saved", **options)[0]) == []


def test_states_may_go_elsewhere_and_a_failed_save_lets_go_of_the_clone(folder, tmp_path, gate, monkeypatch):
    setup = Setup(blocks=2, speculate=False)
    model, trained = begin(setup, TIERS["disk"], folder)
    step(model, trained, setup, 0)
    at_save = everything(model, trained)
    pending = unwall.save(tmp_path / "saved", model, trained, block=False)
    unwall.move(model, unwall.Plan(**TIERS["host"], disk=folder))
    step(model, trained, setup, 1)
    assert gate.waited == []
    gate.open.set()
    pending.wait()
    assert unwall.load(tmp_path / "saved", model, trained) is None
    assert differing(at_save, everything(model, trained)) == []

    unwall.move(model, unwall.Plan(**TIERS["disk"], disk=folder))
    live = unwall.api.engine(model).tiers.disk.ledger.live_bytes

    def failing(*_):
        raise OSError(5, "the drive is gone")

    monkeypatch.setattr(OutStream, "_write", failing)
    with pytest.raises(OSError, match="the drive is gone"):
        unwall.save(tmp_path / "saved", model, trained, block=False).wait()
    assert unwall.api.engine(model).tiers.disk.ledger.live_bytes == live
