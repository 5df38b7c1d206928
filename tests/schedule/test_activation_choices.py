"""Which blocks are kept, moved and recomputed: the best of all choices, on every small case."""

import itertools
import random

import pytest

from unwall.schedule.activations import (
    CHOICES,
    NO_LINK,
    Link,
    Measured,
    choose,
    extra_seconds,
    moved_bytes,
    peak_bytes,
    scaled,
)
from unwall.schedule.observed import Observed


def every_choice(blocks, budget_bytes, link):
    """What all choices that fit cost."""
    for choices in itertools.product(CHOICES, repeat=len(blocks)):
        moved = moved_bytes(blocks, choices)
        flight = link.flight_bytes if moved else 0
        if moved and (not link.bytes_per_second or moved > link.host_bytes):
            continue
        if peak_bytes(blocks, choices) + flight <= budget_bytes:
            yield extra_seconds(blocks, choices, link)


def check(blocks, budget_bytes, link):
    found = choose(blocks, budget_bytes, link)
    best = min(every_choice(blocks, budget_bytes, link), default=None)
    moved = moved_bytes(blocks, found)
    assert moved <= link.host_bytes
    if best is None:  # nothing fits: the least there is
        assert set(found) <= {"host", "recompute"}
        return
    assert peak_bytes(blocks, found) + (link.flight_bytes if moved else 0) <= budget_bytes
    assert extra_seconds(blocks, found, link) == pytest.approx(best)


LINKS = [
    Link(),
    Link(bytes_per_second=4.0, host_bytes=40, flight_bytes=1),
    Link(bytes_per_second=0.5, host_bytes=40),
    Link(bytes_per_second=2.0, host_bytes=5, busy_forward_seconds=1.0, busy_backward_seconds=3.0),
]


@pytest.mark.parametrize("link", LINKS)
def test_equal_blocks_at_every_budget(link):
    for count in (1, 2, 3, 4):
        blocks = [Measured(5, 1, 1.0)] * count
        for budget in range(23):
            check(blocks, budget, link)


def test_any_blocks():
    draw = random.Random(3)
    for _ in range(150):
        blocks = [
            Measured(draw.randint(0, 9), draw.randint(0, 3), draw.choice([0.0, 0.5, 1.0, 3.0]))
            for _ in range(draw.randint(1, 4))
        ]
        check(blocks, draw.randint(1, 30), draw.choice(LINKS))


def test_what_fits_is_kept_and_the_last_blocks_are_kept_longest():
    blocks = [Measured(100, 10, 1.0)] * 6
    assert choose(blocks, 600) == ("keep",) * 6
    # three of them, while the first three hold 10 each
    assert choose(blocks, 330) == ("recompute",) * 3 + ("keep",) * 3
    assert choose(blocks, 0) == ("recompute",) * 6


def test_a_link_with_time_to_spare_carries_what_would_be_recomputed():
    blocks = [Measured(100, 10, 1.0)] * 6
    link = Link(bytes_per_second=50.0, host_bytes=10_000)
    found = choose(blocks, 330, link)
    assert found.count("move") == 3
    assert extra_seconds(blocks, found, link) == 0
    assert choose(blocks, 330, Link(bytes_per_second=50.0, host_bytes=100)).count("move") == 1


def test_large_numbers_are_rounded_to_the_safe_side():
    blocks = [Measured(1_600_000_001, 67_000_003, 0.007)] * 40
    link = Link(bytes_per_second=50e9, host_bytes=10**12, flight_bytes=10**9)
    budget = 24 * 2**30
    found = choose(blocks, budget, link)
    assert peak_bytes(blocks, found) + link.flight_bytes <= budget
    kept = (budget - 10**9) / 1_600_000_001
    assert found.count("keep") >= 0.8 * kept
    assert extra_seconds(blocks, found, link) < extra_seconds(blocks, ("recompute",) * 40)


def test_another_number_of_tokens():
    assert scaled([Measured(100, 10, 1.0)], 2.0) == [Measured(201, 21, 2.0)]


def test_the_loss_comes_when_all_blocks_hold_what_they_hold():
    """It needs 50 where a block's backward needs 10 besides the blocks: two of 40 kept, of 150."""
    blocks = tuple(Measured(40, 5, 1.0) for _ in range(4))
    found = Observed(1, blocks, 10, 150, NO_LINK, loss_bytes=50)
    assert found.best(1.0, 150, NO_LINK).count("keep") == 2
    assert found.needed_bytes(1.0, found.best(1.0, 150, NO_LINK)) == 2 * 40 + 2 * 5 + 50
    assert found.in_blocks_bytes(1.0, found.best(1.0, 150, NO_LINK)) < found.needed_bytes(1.0, found.best(1.0, 150, NO_LINK))
    assert found._replace(loss_bytes=10).best(1.0, 150, NO_LINK).count("keep") == 3
    assert set(found.best(1.0, 10, NO_LINK)) == {"recompute"}
