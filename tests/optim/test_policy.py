"""When to speculate: every short history of a training loop against a definition that looks at all of it."""

from itertools import product

import pytest

from unwall.optim import policy
from unwall.optim.policy import SpeculationPolicy

CLIP_MEMORY, REST_STEPS, LENGTH = 2, 3, 6
PLAIN, QUIET, CLIPPED, UNKNOWN, SEVERAL, RECLAIM = "plain", "quiet", "clipped", "unknown", "several", "reclaim"
"""Steps: without clipping; clipped by a factor of 1; by less; by a factor that is never known; of several backwards. The last is
no step, but a moment at which someone needs the memory."""


@pytest.fixture(autouse=True)
def _short(monkeypatch):
    """Short histories reach every decision."""
    monkeypatch.setattr(policy, "CLIP_MEMORY", CLIP_MEMORY)
    monkeypatch.setattr(policy, "REST_STEPS", REST_STEPS)


def expected(history):
    """By the whole history."""
    steps = [event for event in history if event != RECLAIM]
    loud = max((number for number, event in enumerate(steps) if event in (CLIPPED, SEVERAL)), default=-1)
    since = steps[loud + 1 :]
    trusted = PLAIN in since or since.count(QUIET) >= CLIP_MEMORY
    last = max((number for number, event in enumerate(history) if event == RECLAIM), default=None)
    rested = last is None or len(history) - 1 - last >= REST_STEPS
    return trusted and rested


def decided(history):
    found = SpeculationPolicy()
    for event in history:
        if event == RECLAIM:
            found.reclaimed()
            continue
        found.stepped(passes=2 if event == SEVERAL else 1, clips=event != PLAIN)
        if event in (QUIET, CLIPPED):
            found.scaled_by(1.0 if event == QUIET else 0.5)
    return found.wanted


def test_every_short_history_is_decided_by_the_definition():
    events = (PLAIN, QUIET, CLIPPED, UNKNOWN, SEVERAL, RECLAIM)
    histories = [history for length in range(LENGTH + 1) for history in product(events, repeat=length)]
    assert [history for history in histories if decided(history) != expected(history)] == []
    assert {expected(history) for history in histories} == {True, False}


def test_several_backwards_count_however_they_were_clipped():
    found = SpeculationPolicy()
    found.stepped(passes=1, clips=False)
    found.stepped(passes=3, clips=False)
    assert not found.wanted


def test_a_loss_scale_counts_as_clipping():
    found = SpeculationPolicy()
    for _ in range(CLIP_MEMORY):
        found.stepped(passes=1, clips=True)
        found.scaled_by(1.0)
    assert found.wanted
    found.stepped(passes=1, clips=True)
    found.scaled_by(1 / 65536)
    assert not found.wanted
