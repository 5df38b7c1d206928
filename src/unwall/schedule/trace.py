"""The order in which an iteration uses the groups, learned by watching. Pure bookkeeping."""

from bisect import bisect_left
from collections.abc import Hashable, Iterator, Mapping
from itertools import chain
from typing import Any


class Order:
    """The uses of one pass, and at which places in it each group is used."""

    def __init__(self, uses: list[int]) -> None:
        self.uses = uses
        self.places: dict[int, list[int]] = {}
        for place, group in enumerate(uses):
            self.places.setdefault(group, []).append(place)


class NextUse(Mapping[int, int]):
    """How many uses ahead each group comes next, seen from a place in a pass; to its end and into another one like it.

    A view: nothing is listed, each answer is looked up.
    """

    def __init__(self, order: Order, at: int) -> None:
        self._places = order.places
        self._length = len(order.uses)
        self._at = at

    def __getitem__(self, group: int) -> int:
        found: int | None = self.get(group)
        if found is None:
            raise KeyError(group)
        return found

    def get(self, group: int, default: Any = None) -> Any:  # the one that Mapping has would catch a KeyError each time
        places, at = self._places.get(group), self._at
        if places is None:
            return default
        if places[-1] < at:
            return places[0] + self._length - at
        return places[bisect_left(places, at)] - at

    def __iter__(self) -> Iterator[int]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)


class Trace:
    """Watches one pass after another (a pass: one forward with whatever backward follows it) and predicts the next uses.

    The prediction is the last finished pass of the same kind (training, evaluation). A use that differs from it ends the
    prediction for this pass: everything is then fetched on demand, and the pass becomes the new prediction.
    """

    def __init__(self) -> None:
        self._learned: dict[Hashable, Order] = {}
        self._kind: Hashable = None
        self._now: list[int] = []
        self._expected: Order | None = None
        self.position = 0
        """Uses in this pass so far."""
        self.length = 0
        """Uses that this pass is expected to have; 0 where it cannot be predicted."""
        self.mismatches = 0

    def begin(self, kind: Hashable) -> None:
        """A new pass starts; the one before becomes what is known about its kind."""
        as_expected = self._expected is not None and len(self._expected.uses) == len(self._now)
        if self._now and not as_expected:
            self._learned[self._kind] = Order(self._now)
        self._kind = kind
        self._now, self.position = [], 0
        self._expected = self._learned.get(kind)
        self.length = 0 if self._expected is None else len(self._expected.uses)

    def record(self, group: int) -> bool:
        """A group is used now. False when it is the group that was used last (nothing new)."""
        at = self.position
        if at and self._now[-1] == group:
            return False
        self._now.append(group)
        self.position = at + 1
        if self._expected is not None and (at >= self.length or self._expected.uses[at] != group):
            self._expected, self.length = None, 0
            self.mismatches += 1
        return True

    @property
    def known(self) -> bool:
        """Whether the rest of this pass can be predicted."""
        return self._expected is not None

    def upcoming(self, skip: int = 0, beyond: int | None = None) -> Iterator[int]:
        """The groups that come next, in order, to the end of this pass and into the next one of its kind.

        ``skip``: without so many of them. ``beyond``: into the next one only as far as it is among the next ``beyond``."""
        if self._expected is None:
            return iter(())
        uses, whole, first = self._expected.uses, self.length, self.position + skip
        end = 2 * whole if beyond is None else min(max(whole, self.position + beyond), 2 * whole)
        if end == whole:
            return map(uses.__getitem__, range(first, end))
        return map(uses.__getitem__, chain(range(first, whole), range(max(0, first - whole), end - whole)))

    def next_use(self) -> Mapping[int, int]:
        """For each group that is expected again: how many uses ahead."""
        return {} if self._expected is None else NextUse(self._expected, len(self._now))
