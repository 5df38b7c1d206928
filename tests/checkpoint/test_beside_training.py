"""Saves that go on beside training: what they hold is what there was when they began."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from checkpoint_tools import TIERS, Setup, begin, differing, everything, run, step

import unwall
from unwall.checkpoint import stream
from unwall.checkpoint.lots import LotReader
from unwall.checkpoint.snapshot import Loan

BF16, FP32 = torch.bfloat16, torch.float32


class Gate:
    """Holds a save back before it reads a state, until it is opened: by the test, or by the first update that has to wait."""

    def __init__(self, monkeypatch):
        self.open = threading.Event()
        self.waited = []
        read, wait = LotReader.read, Loan.wait

        def held_back(reader, lot):
            assert self.open.wait(200)
            yield from read(reader, lot)

        def counted(loan):
            self.waited += [block.label for block in loan._blocks]
            self.open.set()
            wait(loan)

        monkeypatch.setattr(LotReader, "read", held_back)
        monkeypatch.setattr(Loan, "wait", counted)


@pytest.fixture
def gate(monkeypatch):
    found = Gate(monkeypatch)
    yield found
    found.open.set()


CASES = [
    ("device", {}),
    ("host", {}),
    ("host", {"speculate": False}),
    ("disk", {}),
    ("disk", {"speculate": False}),
    ("mixed", {}),
]


@pytest.mark.parametrize(("tiers", "options"), CASES)
@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_training_goes_on_and_the_checkpoint_has_the_values_of_before(tmp_path, gate, tiers, options, dtype):
    setup = Setup(blocks=4, frozen=True, dtype=dtype, **options)
    model, optimizer = begin(setup, TIERS[tiers], tmp_path)
    for number in range(3):
        step(model, optimizer, setup, number)
    before = everything(model, optimizer)
    step(model, optimizer, setup, 3)
    at_save = everything(model, optimizer)
    pending = unwall.save(tmp_path / "b", model, optimizer, block=False)
    for number in range(4, 7):
        step(model, optimizer, setup, number)
    after = everything(model, optimizer)
    gate.open.set()
    assert pending.wait() == tmp_path / "b" / "checkpoint-000001"
    found, _ = run(tmp_path, tiers, 4, 4, load=tmp_path / "b", dtype=dtype, **options)
    assert differing(at_save, found) == []
    found, _ = run(tmp_path, tiers, 4, 7, load=tmp_path / "b", dtype=dtype, **options)
    assert differing(after, found) == []
    assert differing(before, at_save) != []


def test_a_group_that_is_updated_ahead_of_its_step_waits_for_nothing(tmp_path, gate):
    setup = Setup(blocks=4)
    model, optimizer = begin(setup, TIERS["host"], tmp_path)
    for number in range(3):
        step(model, optimizer, setup, number)
    pending = unwall.save(tmp_path, model, optimizer, block=False)
    torch.manual_seed(0)
    model(torch.randn(8, 64)).float().square().mean().backward()
    groups = unwall.api.engine(model).groups
    ahead = {groups[index].name for _, index in optimizer._early._speculations._open}
    assert ahead
    while optimizer.ahead.under_way:
        pass
    optimizer.step()
    for group in groups:
        group.pending.settle()
    assert not {name for name in ahead for label in gate.waited if label.endswith(f"group {name}")}
    gate.open.set()
    pending.wait()


def test_other_writes_wait_for_the_save(tmp_path, gate):
    setup = Setup(blocks=2)
    model, optimizer = begin(setup, TIERS["device"], tmp_path)
    step(model, optimizer, setup, 0)
    pending = unwall.save(tmp_path, model, optimizer, block=False)
    before = everything(model, optimizer)
    with unwall.full_params(model, write=True), torch.no_grad():
        for param in model.parameters():
            param.zero_()
    assert gate.waited
    pending.wait()
    found, _ = run(tmp_path, "device", 1, 1, load=tmp_path, blocks=2, frozen=False)
    assert differing(before, found) == []


def test_the_next_save_waits_for_the_one_before(tmp_path, gate):
    model, _ = begin(Setup(blocks=2), TIERS["host"], tmp_path)
    first = unwall.save(tmp_path, model, extra=1, block=False)
    assert not first.done()
    threading.Timer(0.0, gate.open.set).start()
    unwall.save(tmp_path, model, extra=2, keep=1)
    assert first.done()
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-000002"]


def test_an_interrupted_wait_for_the_save_before_loses_nothing_of_it(tmp_path, gate, monkeypatch):
    """Ctrl-C in a save that waits for the one before: that one goes on, and the next one waits for it again."""
    model, _ = begin(Setup(blocks=2), TIERS["host"], tmp_path)
    first = unwall.save(tmp_path, model, extra=1, block=False)

    def interrupted(_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(first._ended, "wait", interrupted)
        with pytest.raises(KeyboardInterrupt):
            unwall.save(tmp_path, model, extra=2)
    threading.Timer(0.0, gate.open.set).start()
    unwall.save(tmp_path, model, extra=3)
    assert first.done()
    assert unwall.load(first.wait(), model) == 1
    assert unwall.load(tmp_path, model) == 3


def test_a_load_waits_for_the_save_before_and_takes_it(tmp_path, gate):
    setup = Setup(blocks=2)
    model, optimizer = begin(setup, TIERS["host"], tmp_path)
    unwall.save(tmp_path / "saved", model, optimizer, extra="old", block=False)
    gate.open.set()
    step(model, optimizer, setup, 0)
    expected = everything(model, optimizer)
    unwall.save(tmp_path / "saved", model, optimizer, extra="new", block=False)
    step(model, optimizer, setup, 1)
    assert unwall.load(tmp_path / "saved", model, optimizer) == "new"
    assert differing(expected, everything(model, optimizer)) == []


def test_old_ones_stay_until_the_new_one_is_complete(tmp_path, gate):
    def there():
        return sorted(path.parent.name for path in tmp_path.glob("checkpoint-*/manifest.json"))

    model, _ = begin(Setup(blocks=2), TIERS["host"], tmp_path)
    gate.open.set()
    for number in range(2):
        unwall.save(tmp_path, model, extra=number)
    gate.open.clear()
    pending = unwall.save(tmp_path, model, extra=2, keep=1, block=False)
    assert there() == ["checkpoint-000001", "checkpoint-000002"]
    gate.open.set()
    pending.wait()
    assert there() == ["checkpoint-000003"]


@pytest.mark.parametrize("then", ["wait", "save", "load", "load_weights"])
def test_a_failure_is_raised_at_the_next_occasion(tmp_path, monkeypatch, then):
    setup = Setup(blocks=2)
    model, optimizer = begin(setup, TIERS["host"], tmp_path)
    unwall.save(tmp_path / "saved", model, optimizer, extra="good")
    with monkeypatch.context() as patched:
        patched.setattr(stream.OutStream, "_write", failing)
        pending = unwall.save(tmp_path / "saved", model, optimizer, block=False)
        step(model, optimizer, setup, 0)
        while not pending.done():
            pass
    calls = {
        "wait": pending.wait,
        "save": lambda: unwall.save(tmp_path / "saved", model, optimizer),
        "load": lambda: unwall.load(tmp_path / "saved", model, optimizer),
        "load_weights": lambda: unwall.load_weights(model, tmp_path / "nothing"),
    }
    with pytest.raises(OSError, match="the drive is gone"):
        calls[then]()
    assert [path.name for path in (tmp_path / "saved").glob("checkpoint-*")] == ["checkpoint-000001"]
    assert unwall.load(tmp_path / "saved", model, optimizer) == "good"  # told once
    with pytest.raises(unwall.CheckpointError, match=r"checkpoint-000002 was not saved: OSError.* the drive is gone"):
        pending.wait()  # there is no path to give


def test_the_program_may_go_to_another_directory_meanwhile(tmp_path, gate, monkeypatch):
    model, _ = begin(Setup(blocks=2), TIERS["host"], tmp_path)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    pending = unwall.save("saved", model, extra="here", block=False)
    monkeypatch.chdir(tmp_path / "elsewhere")
    gate.open.set()
    pending.wait()
    assert unwall.load(tmp_path / "saved", model) == "here"


def failing(*_):
    raise OSError(5, "the drive is gone")


def beside(path, tiers):
    """On each rank: three steps, a save that goes on beside two further ones."""
    setup = Setup(blocks=4, frozen=True, stage=2)
    model, optimizer = begin(setup, TIERS[tiers], path)
    for number in range(3):
        step(model, optimizer, setup, number)
    at_save = everything(model, optimizer)
    pending = unwall.save(path / "saved", model, optimizer, block=False)
    for number in range(3, 5):
        step(model, optimizer, setup, number)
    return at_save, everything(model, optimizer), str(pending.wait())


@pytest.mark.parametrize("tiers", ["host", "disk"])
def test_two_ranks_save_beside_training(ranks, tmp_path, tiers):
    (at_save, after, path), (_, _, other) = ranks(2).run(beside, tmp_path, tiers)
    assert path == other
    assert differing(at_save, ranks(2).run(run, tmp_path, tiers, 3, 3, load=tmp_path / "saved", stage=2)[0][0]) == []
    assert differing(after, ranks(2).run(run, tmp_path, tiers, 3, 5, load=tmp_path / "saved", stage=2)[0][0]) == []


ENDS = """
import sys, torch, unwall
model = torch.nn.Linear(512, 512)
unwall.shard(model)
unwall.save(sys.argv[1], model, extra="last", block=False)
"""


FAILS = """
from unwall.checkpoint import stream
def failing(*_):
    raise OSError(5, "the drive is gone")
stream.OutStream._write = failing
"""


def test_a_script_that_ends_with_a_save_says_when_it_failed(tmp_path):
    environment = os.environ | {"PYTHONPATH": str(Path(unwall.__file__).parent.parent), "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-c", FAILS + ENDS, str(tmp_path)]
    done = subprocess.run(command, env=environment, check=True, timeout=250, capture_output=True, text=True)
    assert f"unwall: {tmp_path}/checkpoint-000001 was not saved: OSError: [Errno 5] the drive is gone" in done.stderr


def test_a_script_that_ends_with_a_save_ends_when_it_is_written(tmp_path):
    environment = os.environ | {"PYTHONPATH": str(Path(unwall.__file__).parent.parent), "CUDA_VISIBLE_DEVICES": ""}
    subprocess.run([sys.executable, "-c", ENDS, str(tmp_path)], env=environment, check=True, timeout=250)
    model = torch.nn.Linear(512, 512)
    unwall.shard(model)
    assert unwall.load(tmp_path, model) == "last"
