"""What the command says may have no listener, or lose it: the run goes on."""

import importlib.util
import os
import sys

import pytest

from unwall.terminal import open_streams, say
from unwall.train.data import name_broken
from unwall.train.errors import TrainError
from unwall.train.live import LiveLine
from unwall.train.log import Log, check_tensorboard


def line(step):
    return {
        "kind": "step", "step": step, "loss": 1.0, "tokens_per_second": 1.0, "seconds": 1.0, "live_bytes": {"device": 1024},
    }  # fmt: skip


def test_a_reader_that_leaves_does_not_end_the_run(monkeypatch):
    read, write = os.pipe()
    with os.fdopen(write, "w") as out:
        monkeypatch.setattr(sys, "stdout", out)
        shown = LiveLine(3, silent=False)
        shown.show(line(1))
        assert os.read(read, 6) == b"step 1"
        os.close(read)
        shown.show(line(3))
        shown.say("3 steps done")
        print("and more", flush=True)
        shown.close()


@pytest.mark.parametrize("name", ["stdout", "stderr"])
def test_lines_that_nobody_reads_do_not_end_the_run(name, monkeypatch):
    """``2>&1 | head``: those beside the live line, and samples that are skipped, find the pipe broken first."""
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as out:
        monkeypatch.setattr(sys, name, out)
        if name == "stdout":
            say("goes on with --lr 0.1")
        else:
            name_broken({0: "data.jsonl:1: no text"})
        print("and more", file=out, flush=True)


def test_a_closed_output_is_no_error(monkeypatch):
    monkeypatch.setattr(sys, "stdout", None)
    open_streams()
    with sys.stdout as out:
        LiveLine(1, silent=False).show(line(1))
        assert out.name == os.devnull


def test_tensorboard_shows_each_step_once_after_a_resume(tmp_path):
    reading = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    for begin, steps in ((0, (1, 2, 3)), (1, (2,))):  # the second start goes on behind step 1
        log = Log(tmp_path / "log.jsonl", begin, tmp_path / "board")
        for step in steps:
            log.add(line(step) | {"lr": 1e-3})
        log.close()
    found = reading.EventAccumulator(str(tmp_path / "board"))
    found.Reload()
    assert [event.step for event in found.Scalars("train/loss")] == [1, 2]
    assert {"train/lr", "train/tokens_per_second"} <= set(found.Tags()["scalars"])


def test_tensorboard_that_is_missing_is_said_before_anything_is_loaded(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        TrainError, match="--tensorboard needs the package tensorboard, which is not installed: pip install tensorboard"
    ):
        check_tensorboard()
