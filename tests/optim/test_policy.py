"""When to speculate: every short history of a training loop against a definition that looks at all of it."""

from itertools import product

import pytest

from unwall.optim import policy
from unwall.optim.policy import Room, SpeculationPolicy, Way, choose_ways

CLIP_MEMORY, QUIET_SHARE, REST_STEPS, LENGTH = 3, 2, 3, 6
PLAIN, QUIET, CLIPPED, UNKNOWN, SEVERAL, RECLAIM = "plain", "quiet", "clipped", "unknown", "several", "reclaim"
"""Steps: without clipping; clipped by a factor of 1; by less; by a factor that is never known; of several backwards. The last is
no step, but a moment at which someone needs the memory."""


@pytest.fixture(autouse=True)
def _short(monkeypatch):
    """Short histories reach every decision."""
    monkeypatch.setattr(policy, "CLIP_MEMORY", CLIP_MEMORY)
    monkeypatch.setattr(policy, "QUIET_SHARE", QUIET_SHARE)
    monkeypatch.setattr(policy, "REST_STEPS", REST_STEPS)


def expected_on_disk(history):
    """By the whole history."""
    steps = [event for event in history if event != RECLAIM]
    loud = max((number for number, event in enumerate(steps) if event in (CLIPPED, SEVERAL)), default=-1)
    since = steps[loud + 1 :]
    trusted = PLAIN in since or since.count(QUIET) >= CLIP_MEMORY
    return trusted and rested(history)


def expected(history):
    """The same in memory, where a miss costs little: some of the last steps are enough."""
    steps = [event for event in history if event != RECLAIM]
    several = max((number for number, event in enumerate(steps) if event == SEVERAL), default=-1)
    known = [event for event in steps[several + 1 :] if event in (QUIET, CLIPPED)][-CLIP_MEMORY:]
    return expected_on_disk(history) or (known.count(QUIET) >= QUIET_SHARE and rested(history))


def rested(history):
    last = max((number for number, event in enumerate(history) if event == RECLAIM), default=None)
    return last is None or len(history) - 1 - last >= REST_STEPS


def decided(history):
    found = SpeculationPolicy()
    for event in history:
        if event == RECLAIM:
            found.reclaimed()
            continue
        found.stepped(passes=2 if event == SEVERAL else 1, clips=event != PLAIN)
        if event in (QUIET, CLIPPED):
            found.scaled_by(1.0 if event == QUIET else 0.5)
    return found.wanted_on_disk, found.wanted


def test_every_short_history_is_decided_by_the_definition():
    events = (PLAIN, QUIET, CLIPPED, UNKNOWN, SEVERAL, RECLAIM)
    histories = [history for length in range(LENGTH + 1) for history in product(events, repeat=length)]
    both = {history: (expected_on_disk(history), expected(history)) for history in histories}
    assert [history for history in histories if decided(history) != both[history]] == []
    assert set(both.values()) == {(True, True), (False, True), (False, False)}


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
    assert found.wanted_on_disk
    found.stepped(passes=1, clips=True)
    found.scaled_by(1 / 65536)
    assert not found.wanted_on_disk


def total(ways, groups):
    sizes = {Way.SHADOW: 0, Way.JOURNAL: 1}
    return sum(group[sizes[way]] for way, group in zip(ways, groups, strict=True) if way is not Way.WAIT)


def best_ways(groups, room):
    """Of all ways that fit, in which the groups that wait are the last ones, and those with a shadow the first ones: as many as
    possible are updated ahead, then as many as possible of these out of place."""
    order = [Way.SHADOW, Way.JOURNAL, Way.WAIT]
    sorted_ways = [ways for ways in product(order, repeat=len(groups)) if list(ways) == sorted(ways, key=order.index)]
    fitting = [ways for ways in sorted_ways if total(ways, groups) <= room]
    return max(fitting, key=lambda ways: (-ways.count(Way.WAIT), ways.count(Way.SHADOW)))


def test_the_way_of_each_group_is_the_best_that_fits():
    sizes = [Room(12, 2), Room(6, 1), Room(24, 4)]
    cases = [groups for count in range(4) for groups in product(sizes, repeat=count)]
    wrong = [
        (groups, room) for groups in cases for room in range(75) if tuple(choose_ways(groups, room)) != best_ways(groups, room)
    ]
    assert wrong == []


def test_without_a_limit_every_group_has_a_shadow():
    assert choose_ways([Room(12, 2)] * 3, float("inf")) == [Way.SHADOW] * 3
