"""What groups may take of a card where the plan does not say: decided from what a probe reads."""

import pytest

from unwall.schedule.limit import MARGIN_SHARE, MOST_MARGIN_SHARE, Allocated, Limit, limit_of

CARD, FLOOR = 6400, 500


class Card:
    """A card with 6400 bytes. ``others``: what is allocated beside ``ours``."""

    def __init__(self):
        self.ours = self.others = self.peak = self.failures = 0
        self.elsewhere = 0  # other processes
        self.reserved = 1000

    def free_bytes(self):
        return CARD - self.elsewhere - self.reserved

    def allocated(self):
        self.peak = max(self.peak, self.ours + self.others)
        return Allocated(self.reserved, self.ours + self.others, self.peak, self.failures)


@pytest.fixture
def card():
    return Card()


@pytest.fixture
def limit(card):
    return Limit(card, lambda: card.ours, FLOOR)


def run(card, limit, others, kind=True, ours=400):
    """One pass; gives the limit at each use."""
    limit.begin(kind)
    found = []
    for card.others in others:
        card.ours = ours
        limit.used()
        found.append(limit.nbytes)
    card.others = 0
    return found


def left(others_bytes, margin_share=MARGIN_SHARE):
    return limit_of(CARD, others_bytes, margin_share, FLOOR)


def test_what_is_left_is_the_card_less_others_and_a_margin():
    assert left(1000) == 5000
    assert left(1001) == 4900  # a multiple of a small part of the card
    assert left(6000) == FLOOR
    assert left(None) == FLOOR


def test_the_first_pass_holds_what_it_needs_and_the_second_what_is_left(card, limit):
    assert run(card, limit, [100, 1500, 3000, 200]) == [FLOOR] * 4
    assert run(card, limit, [100, 1500, 3000, 200]) == [left(3000)] * 4


def test_what_others_held_between_two_uses_is_not_forgotten_when_the_peak_does_not_show_it_again(card, limit):
    """A loss: 3000 more than what waits for backward. The allocator's peak shows it in the first pass alone."""

    def a_pass(ours):
        limit.begin(True)
        for card.others, between in ((1000, 0), (1000, 3000), (500, 0)):
            card.ours = ours
            limit.used()
            card.peak = max(card.peak, card.ours + card.others + between)
        card.others = 0
        return limit.nbytes

    a_pass(ours=400)
    assert [a_pass(ours=300) for _ in range(3)] == [left(4000)] * 3


def test_each_kind_of_pass_is_measured_for_itself(card, limit):
    run(card, limit, [3000])
    assert run(card, limit, [100], kind=False) == [FLOOR]
    assert run(card, limit, [3000]) == [left(3000)]
    assert run(card, limit, [100], kind=False) == [left(100)]


def test_a_larger_batch_makes_room_in_proportion_before_its_activations_are_there(card, limit):
    run(card, limit, [100, 1000, 2000, 100])
    assert run(card, limit, [100, 2000, 4000, 200]) == [left(2000), left(4000), left(4000), left(4000)]
    assert run(card, limit, [100, 1000, 2000, 100]) == [left(4000)] * 4
    assert run(card, limit, [100, 1000, 2000, 100]) == [left(2000)] * 4


def test_what_came_and_went_between_two_uses_counts(card, limit):
    limit.begin(True)
    card.ours, card.others = 400, 2500
    card.allocated()  # the peak, which nobody sees at a use
    card.others = 100
    limit.used()
    card.others = 0
    assert run(card, limit, [100]) == [left(2500)]


def test_other_processes_take_of_the_card(card, limit):
    run(card, limit, [1000])
    card.elsewhere = 3200
    assert run(card, limit, [1000]) == [limit_of(CARD - 3200, 1000, MARGIN_SHARE, FLOOR)]


def test_what_others_hold_all_the_time_is_theirs(card, limit):
    run(card, limit, [1000])
    card.others = 3200
    limit.begin(True)
    assert limit.nbytes == limit_of(CARD - 3200, 1000, MARGIN_SHARE, FLOOR)


def test_after_an_out_of_memory_nothing_is_known_and_the_margin_is_larger(card, limit):
    run(card, limit, [1000])
    assert run(card, limit, [1000]) == [left(1000)]
    card.failures += 1
    assert run(card, limit, [1000]) == [FLOOR]
    assert run(card, limit, [1000]) == [left(1000, 2 * MARGIN_SHARE)]
    card.failures += 1
    run(card, limit, [1000])
    card.failures += 1
    run(card, limit, [1000])
    assert run(card, limit, [1000]) == [left(1000, MOST_MARGIN_SHARE)]
