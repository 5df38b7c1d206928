"""Which groups must not be dropped, and which only should not. Pure bookkeeping.

[Note: two kinds of pins]
A *hard* pin says that something reads the group now: a call on the stack. A *soft* pin says that backward will read it: from
the moment a call's backward begins until its last gradient is in. Every such read goes through runtime/saved.py, which fetches
what is absent. So where room is short a soft pin is given up, its group is dropped, and the read fetches it again. What the
autograd node that runs now has been given already (``being_read``) stays in any case.
"""

from collections.abc import Callable, Collection


class Pins:
    """Counts of hard pins, one soft pin per group, and the group that was used last."""

    def __init__(self, groups: int) -> None:
        self.current: int | None = None
        """The group that was used last."""
        self.being_read: Callable[[], Collection[int]] = tuple
        """Groups that the running autograd node holds tensors of."""
        self._hard = [0] * groups
        self._soft: set[int] = set()

    def grow(self, groups: int) -> None:
        """There are more groups now."""
        self._hard += [0] * (groups - len(self._hard))

    def add(self, index: int) -> None:
        self._hard[index] += 1

    def remove(self, index: int) -> None:
        """Takes one hard pin back."""
        self._hard[index] -= 1

    def is_hard(self, index: int) -> bool:
        return self._hard[index] > 0

    def is_soft(self, index: int) -> bool:
        return index in self._soft

    def holds(self, index: int) -> bool:
        """Whether it is pinned in either way."""
        return index in self._soft or self._hard[index] > 0

    def soften(self, index: int) -> None:
        """A hard pin becomes the group's soft one."""
        self._hard[index] -= 1
        self._soft.add(index)

    def give_up(self, index: int) -> None:
        """The soft pin, if there is one, is no more."""
        self._soft.discard(index)

    def clear_soft(self) -> None:
        self._soft.clear()

    def clear(self) -> None:
        """Nothing is in use."""
        self._hard = [0] * len(self._hard)
        self._soft.clear()
        self.current = None

    def should_stay(self) -> Callable[[int], bool]:
        """Whether a group is pinned at all, or was used last."""
        return lambda index: self._hard[index] > 0 or index in self._soft or index == self.current

    def must_stay(self) -> Callable[[int], bool]:
        """Whether something reads a group now."""
        read = self.being_read()
        return lambda index: self._hard[index] > 0 or index in read
