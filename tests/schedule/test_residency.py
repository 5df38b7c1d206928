"""What to drop and what to fetch ahead, tried exhaustively on small cases."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from unwall.schedule.residency import Occupant, choose_drops, next_missing
from unwall.schedule.trace import Trace


@given(
    st.lists(st.tuples(st.integers(1, 5), st.booleans(), st.one_of(st.none(), st.integers(0, 9))), max_size=6),
    st.integers(0, 12),
    st.one_of(st.none(), st.integers(0, 9)),
)
def test_drops_are_enough_allowed_and_furthest_first(entries, needed, sooner_than):
    held = [Occupant(index, nbytes, pinned) for index, (nbytes, pinned, _) in enumerate(entries)]
    next_use = {index: use for index, (_, _, use) in enumerate(entries) if use is not None}
    far = [next_use.get(index, 100) for index in range(len(held))]
    allowed = [entry for entry in held if not entry.pinned and (sooner_than is None or far[entry.group] > sooner_than)]
    drops = choose_drops(held, next_use, needed, sooner_than)
    if drops is None:
        assert sum(entry.nbytes for entry in allowed) < needed
        return
    assert set(drops) <= {entry.group for entry in allowed}
    assert sum(held[index].nbytes for index in drops) >= needed
    assert sum(held[index].nbytes for index in drops[:-1]) < max(needed, 1)  # no more than needed
    kept = [entry.group for entry in allowed if entry.group not in drops]
    assert all(far[kept_one] <= far[index] for kept_one, index in itertools.product(kept, drops))


def test_the_next_missing_group_is_the_first_one_ahead():
    assert next_missing([3, 1, 2], {3}) == (1, 1)
    assert next_missing([3, 1, 2], {3}, first=4) == (1, 5)
    assert next_missing([3, 1, 2], {1, 2, 3}) is None
    assert next_missing([], set()) is None


def passes(trace, *orders):
    for order in orders:
        trace.begin("train")
        for group in order:
            trace.record(group)


def test_a_pass_is_predicted_from_the_one_before_and_wraps_around():
    trace = Trace()
    passes(trace, [0, 1, 1, 2, 1, 0])
    trace.begin("train")
    trace.record(0)
    assert list(trace.upcoming()) == [1, 2, 1, 0, 0, 1, 2, 1, 0]
    assert trace.next_use() == {1: 0, 2: 1, 0: 3}


@given(st.lists(st.integers(0, 4), min_size=1, max_size=12))
def test_the_next_use_is_looked_up_as_it_would_be_listed(order):
    trace = Trace()
    passes(trace, order)
    trace.begin("train")
    for group in order:
        listed = {}
        for distance, upcoming in enumerate(trace.upcoming()):
            listed.setdefault(upcoming, distance)
        assert trace.next_use() == listed
        assert trace.next_use().get(9) is None
        trace.record(group)


def test_a_pass_that_ends_early_becomes_the_prediction():
    trace = Trace()
    passes(trace, [0, 1, 2], [0, 1])
    trace.begin("train")
    assert list(trace.upcoming()) == [0, 1, 0, 1]


def test_another_order_ends_the_prediction_for_this_pass_only():
    trace = Trace()
    passes(trace, [0, 1, 2], [0, 2])
    assert not trace.known
    assert trace.mismatches == 1
    trace.begin("train")
    assert list(trace.upcoming())[:2] == [0, 2]  # learned anew


def test_kinds_do_not_disturb_each_other():
    trace = Trace()
    passes(trace, [0, 1])
    trace.begin("evaluation")
    trace.record(5)
    trace.begin("train")
    trace.record(0)
    assert trace.known
    assert next(trace.upcoming()) == 1
