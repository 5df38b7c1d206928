"""Which groups must not be dropped, and which only should not. Pure bookkeeping.

[Note: two kinds of pins]
A *hard* pin says that something reads the group now: a call on the stack. A *soft* pin says that backward will read it: from
the moment a call's backward begins until its last gradient is in. Every such read goes through runtime/saved.py, which fetches
what is absent. So where room is short a soft pin is given up, its group is dropped, and the read fetches it again. What the
autograd node that runs now has been given already (``being_read``) stays in any case.
"""

from collections.abc import Callable, Collection, Iterable


class Pins:
    """Counts of hard pins, one soft pin per group, and the group that was used last."""

    def __init__(self, groups: int) -> None:
        self.current: int | None = None
        """The group that was used last."""
        self.being_read: Callable[[], Collection[int]] = tuple
        """Groups that the running autograd node holds tensors of."""
        self.hard = [0] * groups
        """How many hard pins each group has."""
        self.soft: set[int] = set()
        """Groups with a soft pin."""

    def grow(self, groups: int) -> None:
        """There are more groups now."""
        self.hard += [0] * (groups - len(self.hard))

    def is_soft(self, index: int) -> bool:
        return index in self.soft

    def holds(self, index: int) -> bool:
        """Whether it is pinned in either way."""
        return index in self.soft or self.hard[index] > 0

    def give_up(self, index: int) -> None:
        """The soft pin, if there is one, is no more."""
        self.soft.discard(index)

    def clear_soft(self) -> None:
        self.soft.clear()

    def clear(self) -> None:
        """Nothing is in use."""
        self.hard = [0] * len(self.hard)
        self.soft.clear()
        self.current = None

    def should_stay(self, groups: Iterable[int]) -> set[int]:
        """Those of the groups that are pinned at all, or were used last."""
        return {index for index in groups if self.hard[index] > 0 or index in self.soft or index == self.current}

    def must_stay(self, groups: Iterable[int]) -> set[int]:
        """Those that something reads now."""
        read = self.being_read()
        return {index for index in groups if self.hard[index] > 0 or index in read}
