"""Bars of what takes long."""

import io
import sys

import pytest

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
