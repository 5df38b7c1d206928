"""The order in which an iteration uses the groups, learned by watching. Pure bookkeeping."""

from collections.abc import Hashable, Iterator


class Trace:
    """Watches one pass after another (a pass: one forward with whatever backward follows it) and predicts the next uses.

    The prediction is the last finished pass of the same kind (training, evaluation). A use that differs from it ends the
    prediction for this pass: everything is then fetched on demand, and the pass becomes the new prediction.
    """

    def __init__(self) -> None:
        self._learned: dict[Hashable, list[int]] = {}
        self._kind: Hashable = None
        self._now: list[int] = []
        self._expected: list[int] | None = None
        self.mismatches = 0

    def begin(self, kind: Hashable) -> None:
        """A new pass starts; the one before becomes what is known about its kind."""
        if self._now:
            self._learned[self._kind] = self._now
        self._kind = kind
        self._now = []
        self._expected = self._learned.get(kind)

    def record(self, group: int) -> bool:
        """A group is used now. False when it is the group that was used last (nothing new)."""
        if self._now and self._now[-1] == group:
            return False
        at = len(self._now)
        self._now.append(group)
        if self._expected is not None and (at >= len(self._expected) or self._expected[at] != group):
            self._expected = None
            self.mismatches += 1
        return True

    @property
    def known(self) -> bool:
        """Whether the rest of this pass can be predicted."""
        return self._expected is not None

    def upcoming(self) -> Iterator[int]:
        """The groups that come next, in order, to the end of this pass and into the next one of its kind."""
        if self._expected is None:
            return
        at = len(self._now)
        yield from self._expected[at:]
        yield from self._expected

    def next_use(self) -> dict[int, int]:
        """For each group that is expected again: how many uses ahead."""
        found: dict[int, int] = {}
        for distance, group in enumerate(self.upcoming()):
            found.setdefault(group, distance)
        return found
