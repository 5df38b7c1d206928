"""Groups counted by kind, for decisions that try many homes."""

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from typing import Generic, TypeVar

SizesT = TypeVar("SizesT", bound=Hashable)
HomeT = TypeVar("HomeT", bound=Hashable)

ALIKE = 3
"""Groups of a kind that come and go at once, at most: what ``working_bytes`` in working.py counts."""


class Tally(Generic[SizesT, HomeT]):
    """How many groups there are of each kind: with these sizes, at that home.

    Most groups of a model are alike, so a trial that goes over kinds sees the same bytes as one that goes over groups, in a
    fraction of the time.
    """

    def __init__(self, sizes: Sequence[SizesT], homes: Sequence[HomeT]) -> None:
        numbers: dict[SizesT, int] = {}
        self.kinds = [numbers.setdefault(size, len(numbers)) for size in sizes]
        """By group, which of the different sizes it has."""
        self.homes = list(homes)
        self._sizes = list(numbers)
        self._counts = Counter(zip(self.kinds, self.homes, strict=True))

    def move(self, index: int, home: HomeT) -> None:
        """A group to another home."""
        kind = self.kinds[index]
        self._counts[kind, self.homes[index]] -= 1
        self._counts[kind, home] += 1
        self.homes[index] = home

    def held_bytes(self, bytes_of: Callable[[SizesT, HomeT], int]) -> int:
        """Of all groups together."""
        return sum(count * bytes_of(self._sizes[kind], home) for (kind, home), count in self._counts.items() if count)

    def some(self) -> tuple[list[SizesT], list[HomeT]]:
        """Sizes and homes of as many groups of each kind as may come and go at once."""
        found = [(self._sizes[kind], home) for (kind, home), count in self._counts.items() for _ in range(min(count, ALIKE))]
        return [size for size, _ in found], [home for _, home in found]
