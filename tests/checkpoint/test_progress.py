"""Bars of what takes long."""

import contextlib
import io
import sys

import pytest
import torch

import unwall
from unwall.checkpoint import weights_out
from unwall.checkpoint.progress import progress


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize(("rank", "shown"), [(0, True), (1, False)])
def test_a_bar_on_a_terminal_and_on_the_first_rank_only(monkeypatch, rank, shown):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with progress("loading weights", 1000, rank) as advance:
        advance(600)
        advance(400)
    assert ("loading weights" in terminal.getvalue()) is shown


def test_no_bar_elsewhere(monkeypatch):
    written = io.StringIO()
    monkeypatch.setattr(sys, "stderr", written)
    with progress("loading weights", 1000) as advance:
        advance(1000)
    assert written.getvalue() == ""


def test_an_export_to_another_dtype_ends_at_its_total(monkeypatch, tmp_path):
    told = {}

    @contextlib.contextmanager
    def counted(what, total, rank):
        told.update(total=total, done=0)
        yield lambda nbytes: told.update(done=told["done"] + nbytes)

    monkeypatch.setattr(weights_out, "progress", counted)
    model = unwall.shard(torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.BatchNorm1d(64)))
    unwall.export_weights(model, tmp_path / "out", dtype=torch.bfloat16)
    assert told["done"] == pytest.approx(told["total"], abs=1024)  # the header of the file is not counted
