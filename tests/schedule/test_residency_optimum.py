"""Fetches and drops on a small device, for every order of uses, against the best that any choice of drops could reach.

[Note: small device]
A pass is learned, then repeated. The device drops by ``choose_drops`` and fetches ahead by ``next_missing``, as the executor
does; beside it the smallest possible number of fetches is found by trying every set of groups that could be kept at every use.
A fetch counts at the use it serves, so that what was fetched ahead for later does not count against looking ahead.
"""

import itertools
from collections.abc import Iterable, Iterator, Sequence

import pytest

from unwall.schedule.residency import Occupant, choose_drops, may_fetch_ahead, next_missing
from unwall.schedule.trace import Trace

NEVER = 10**9


class Device:
    """Holds groups within ``capacity``; checks at every fetch that nothing in use and nothing needed sooner is dropped."""

    def __init__(self, sizes: Sequence[int], capacity: int, look_ahead: int = 0) -> None:
        self.sizes, self.capacity, self.look_ahead = sizes, capacity, look_ahead
        self.trace = Trace()
        self.held: set[int] = set()
        self.unused: set[int] = set()
        """Fetched, but not used since."""
        self.served = 0
        """Fetches that a use has needed."""
        self.wasted = 0
        """Fetches that no use came for."""
        self.waits = 0
        """Uses that found their group absent."""

    def run(self, order: Iterable[int]) -> list[int]:
        """One pass; after each use, how many fetches were needed so far."""
        self.trace.begin("train")
        counts = []
        for group in order:
            self._use(group)
            counts.append(self.served)
        return counts

    def _use(self, group: int) -> None:
        self.trace.record(group)
        if group not in self.held:
            self.waits += 1
            assert self._fetch(group, group, None), "nothing else is in use: there is room for every single group"
        while (found := next_missing(self.trace.upcoming(beyond=self.look_ahead), self.held)) is not None:
            ahead = [self.sizes[index] for index in self.unused - {group}]
            if not may_fetch_ahead(ahead, self.sizes[found[0]], max(self.sizes), self.look_ahead):
                break
            if not self._fetch(found[0], group, found[1]):
                break
        self.served += group in self.unused
        self.unused.discard(group)

    def _fetch(self, group: int, in_use: int, distance: int | None) -> bool:
        free = self.capacity - self._bytes(self.held)
        held = [Occupant(index, self.sizes[index], index == in_use) for index in sorted(self.held)]
        next_use = self.trace.next_use()
        drops = choose_drops(held, next_use, self.sizes[group] - free, distance)
        upcoming = list(self.trace.upcoming())
        sooner = set() if distance is None else set(upcoming[: distance + 1])
        if drops is None:
            assert self._bytes(self.held - sooner - {in_use}) + free < self.sizes[group], "it could have been fetched"
            return False
        assert set(drops) <= self.held - {in_use} - sooner
        self.wasted += len(self.unused & set(drops))
        self.held = self.held - set(drops) | {group}
        self.unused = self.unused & self.held | {group}
        assert self._bytes(self.held) <= self.capacity
        return True

    def _bytes(self, groups: Iterable[int]) -> int:
        return sum(self.sizes[group] for group in groups)


def orders(groups: int, longest: int) -> Iterator[tuple[int, ...]]:
    """Every order of uses in which no group follows itself (the trace takes that as one use)."""
    for length in range(1, longest + 1):
        for order in itertools.product(range(groups), repeat=length):
            if all(first != second for first, second in itertools.pairwise(order)):
                yield order


def subsets(groups: Iterable[int]) -> list[frozenset[int]]:
    members = sorted(groups)
    return [frozenset(some) for count in range(len(members) + 1) for some in itertools.combinations(members, count)]


def fewest_fetches(
    sizes: Sequence[int], capacity: int, starts: Iterable[frozenset[int]], order: Sequence[int], costs: Sequence[int]
) -> list[int]:
    """The smallest cost of all fetches up to each use, over every choice of what to keep, from the best of ``starts``."""
    cheapest = {held: 0 for held in starts if sum(sizes[group] for group in held) <= capacity}
    found = []
    for group in order:
        after: dict[frozenset[int], int] = {}
        for held, cost in cheapest.items():
            kept = [held] if group in held else [some | {group} for some in subsets(held)]
            cost += 0 if group in held else costs[group]
            for choice in kept:
                if sum(sizes[index] for index in choice) <= capacity:
                    after[choice] = min(cost, after.get(choice, NEVER))
        cheapest = after
        found.append(min(cheapest.values()))
    return found


@pytest.mark.parametrize(("groups", "longest"), [(2, 6), (3, 6), (4, 5)])
def test_on_demand_no_choice_of_drops_needs_fewer_fetches(groups, longest):
    for order in orders(groups, longest):
        for capacity in range(1, groups + 1):
            device = Device([1] * groups, capacity)
            learned = device.run(order)[-1]
            start = frozenset(device.held)
            counts = device.run(order) + device.run(order)
            best = fewest_fetches([1] * groups, capacity, [start], order * 2, [1] * groups)
            assert [count - learned for count in counts] == best, (order, capacity)


@pytest.mark.parametrize(("groups", "longest"), [(3, 6), (4, 5), (5, 4)])
@pytest.mark.parametrize("look_ahead", [1, 2, 3])
def test_looking_ahead_waits_for_nothing_and_costs_no_more_than_the_room_it_takes(groups, longest, look_ahead):
    """With room for two groups nothing is waited for once the order is known. The number of fetches lies between the optimum
    and that of a device that is smaller by the groups on their way: those, and not only what is used now, must be held."""
    for order in orders(groups, longest):
        for capacity in range(2, groups + 1):
            device = Device([1] * groups, capacity, look_ahead)
            learned = device.run(order)[-1]
            start, device.waits = frozenset(device.held), 0
            counts = [count - learned for count in device.run(order) + device.run(order)]
            assert device.waits <= (order[0] not in start), (order, capacity)
            assert device.wasted == 0, (order, capacity)
            best = fewest_fetches([1] * groups, capacity, [start], order * 2, [1] * groups)
            smaller = max(1, capacity - look_ahead)
            bound = fewest_fetches([1] * groups, smaller, subsets(start), order * 2, [1] * groups)
            assert all(low <= count <= high for low, count, high in zip(best, counts, bound, strict=True)), (order, capacity)


@pytest.mark.parametrize("look_ahead", [1, 2, 3])
def test_a_training_pass_needs_no_more_fetches_for_looking_ahead(look_ahead):
    """Forward through the groups, then backward: what was used last is needed first, so the room is there for both. Only the
    first predicted pass may need more, because of what the pass before left on the device."""
    for groups in range(2, 9):
        order = [*range(groups), *range(groups - 2, -1, -1)]
        for capacity in range(2, groups + 1):
            totals = []
            for device in (Device([1] * groups, capacity), Device([1] * groups, capacity, look_ahead)):
                counts = [device.run(order)[-1] for _ in range(6)]
                totals.append([after - before for before, after in itertools.pairwise(counts[1:])])
            assert totals[0] == totals[1] == [2 * (groups - capacity)] * 4, (groups, capacity)


@pytest.mark.parametrize("sizes", [(1, 2, 3), (1, 3, 3), (2, 3, 4), (1, 1, 3, 3), (1, 2, 3, 4)])
def test_groups_of_different_sizes_fetch_no_more_than_if_all_had_the_largest(sizes):
    """Furthest first is not optimal here (finding the optimum is a knapsack). In fetches it is never worse than an optimal
    device on which every group takes as much as the largest one; what it holds stays within the capacity all the same."""
    ones, largest = [1] * len(sizes), max(sizes)
    for order in orders(len(sizes), 5 if len(sizes) < 4 else 4):
        for capacity, look_ahead in itertools.product(range(largest, sum(sizes) + 1), (0, 2)):
            device = Device(sizes, capacity, look_ahead)
            learned = device.run(order)[-1]
            start = frozenset(device.held)
            counts = [count - learned for count in device.run(order) + device.run(order)]
            assert counts[-1] >= fewest_fetches(sizes, capacity, [start], order * 2, ones)[-1]
            if look_ahead == 0:
                bound = fewest_fetches(ones, capacity // largest, subsets(start), order * 2, ones)
                assert all(count <= high for count, high in zip(counts, bound, strict=True)), (order, capacity)


def test_after_another_order_the_new_one_is_learned_and_optimal_again():
    for first, second in itertools.product(orders(3, 4), repeat=2):
        for look_ahead in (0, 2):
            device = Device([1, 1, 1], 2, look_ahead)
            device.run(first)
            learned = device.run(second)[-1]
            assert device.trace.mismatches == (second != first[: len(second)])
            start = frozenset(device.held)
            counts = [count - learned for count in device.run(second)]
            assert device.trace.mismatches == (second != first[: len(second)])  # no further one
            if look_ahead == 0:
                assert counts == fewest_fetches([1] * 3, 2, [start], second, [1] * 3), (first, second)


def drop_cases(
    entries: int, nbytes: Sequence[int], uses: Sequence[int | None]
) -> Iterator[tuple[list[Occupant], dict[int, int]]]:
    for case in itertools.product(itertools.product(nbytes, (False, True), uses), repeat=entries):
        held = [Occupant(index, size, pinned) for index, (size, pinned, _) in enumerate(case)]
        yield held, {index: use for index, (_, _, use) in enumerate(case) if use is not None}


@pytest.mark.parametrize(
    ("entries", "nbytes", "uses"), [(1, (0, 1, 3), (None, 0, 1, 2)), (2, (0, 1, 3), (None, 0, 1, 2)), (3, (1, 2), (None, 0, 1))]
)
def test_drops_free_enough_exactly_when_that_is_possible(entries, nbytes, uses):
    for held, next_use in drop_cases(entries, nbytes, uses):
        far = [next_use.get(entry.group, NEVER) for entry in held]
        for needed, sooner_than in itertools.product(range(-1, 8), (None, 0, 1)):
            allowed = {e.group for e in held if not e.pinned and (sooner_than is None or far[e.group] > sooner_than)}
            drops = choose_drops(held, next_use, needed, sooner_than)
            assert drops == choose_drops(held[::-1], next_use, needed, sooner_than)  # on every rank, whatever the order
            if drops is None:
                assert sum(held[group].nbytes for group in allowed) < needed
                continue
            assert set(drops) <= allowed
            assert all(held[group].nbytes > 0 for group in drops), "dropped for nothing"
            assert len(set(drops)) == len(drops)
            assert sum(held[group].nbytes for group in drops) >= needed
            assert sum(held[group].nbytes for group in drops[:-1]) < needed or not drops
            kept = [group for group in allowed if held[group].nbytes > 0 and group not in drops]
            assert all(far[stays] <= far[goes] for stays, goes in itertools.product(kept, drops))


def test_the_next_missing_group_is_the_first_absent_one():
    for length in range(5):
        for upcoming in itertools.product(range(3), repeat=length):
            for present, first in itertools.product(subsets(range(3)), range(3)):
                absent = [(group, at) for at, group in enumerate(upcoming, first) if group not in present]
                assert next_missing(iter(upcoming), set(present), first) == (absent[0] if absent else None)


def test_as_much_is_fetched_ahead_as_the_largest_groups_would_be():
    for ahead in (some for count in range(4) for some in itertools.product(range(1, 5), repeat=count)):
        for amount, most in itertools.product(range(1, 5), range(3)):
            fits = sum(ahead) + amount <= 4 * most  # the largest has 4
            assert may_fetch_ahead(ahead, amount, 4, most) == (len(ahead) < most or (most > 0 and fits))
            assert may_fetch_ahead(ahead, amount, 4, most) <= (sum(ahead) + amount <= max(4 * most, 4 * len(ahead) + amount))


def test_what_comes_next_ends_with_the_pass_or_a_few_uses_later():
    for order in every_order(3, 5):
        uses = [group for group, _ in itertools.groupby(order)]
        trace = Trace()
        trace.begin("train")
        for group in uses:
            trace.record(group)
        trace.begin("train")
        for at in range(len(uses) + 1):
            whole = [*uses[at:], *uses]
            assert list(trace.upcoming()) == whole
            for skip, beyond in itertools.product(range(4), range(4)):
                reach = max(len(uses) - at, beyond)
                assert list(trace.upcoming(skip, beyond)) == whole[:reach][skip:]
            if at < len(uses):
                trace.record(uses[at])


def check_trace(passes: Sequence[tuple[str, tuple[int, ...]]], groups: int) -> None:
    """A trace against its definition: the prediction is the last pass of the same kind that used anything."""
    trace, seen, mismatches = Trace(), [], 0
    for kind, order in passes:
        trace.begin(kind)
        expected = next((uses for known, uses in reversed(seen) if known == kind and uses), None)
        uses: list[int] = []
        for group in (None, *order):
            if group is not None:
                assert trace.record(group) == (uses[-1:] != [group])
                uses += [group] if uses[-1:] != [group] else []
            follows = expected is not None and uses == expected[: len(uses)]
            ahead = [*expected[len(uses) :], *expected] if follows else []
            assert trace.known == follows
            assert list(trace.upcoming()) == ahead
            next_use = trace.next_use()
            for index in range(groups + 1):
                assert (index in next_use) == (index in ahead)
                assert next_use.get(index, NEVER) == (ahead.index(index) if index in ahead else NEVER)
                assert index not in ahead or next_use[index] == ahead.index(index)
            assert trace.mismatches == mismatches + (expected is not None and not follows)
        mismatches = trace.mismatches
        seen.append((kind, uses))


def every_order(groups: int, longest: int) -> list[tuple[int, ...]]:
    return [order for length in range(longest + 1) for order in itertools.product(range(groups), repeat=length)]


def test_a_trace_predicts_the_last_pass_of_its_kind():
    for first, second, third in itertools.product(every_order(2, 2), every_order(2, 2), every_order(2, 3)):
        for kinds in itertools.product(("train", "evaluation"), repeat=2):
            check_trace([("train", first), (kinds[0], second), (kinds[1], third)], groups=2)


def test_a_trace_ends_its_prediction_at_the_first_difference_and_learns_anew():
    for first, second in itertools.product(every_order(3, 3), every_order(3, 4)):
        check_trace([("train", first), ("train", second), ("train", second)], groups=3)
