"""The uses of a pass, known beforehand: what ``schedule/trace.py`` would predict."""

from bisect import bisect_left
from collections.abc import Iterator, Mapping
from typing import Any


class Order(Mapping[int, int]):
    """The next use of each group, counted from where the pass is: what ``Trace.next_use`` says, without listing it."""

    def __init__(self, uses: list[int]) -> None:
        self.uses = uses
        self.at = 0
        self._places: dict[int, list[int]] = {}
        for place, group in enumerate(uses):
            self._places.setdefault(group, []).append(place)

    def __getitem__(self, group: int) -> int:
        places = self._places[group]
        if places[-1] < self.at:
            return places[0] + len(self.uses) - self.at
        return places[bisect_left(places, self.at)] - self.at

    def get(self, group: int, default: Any = None) -> Any:  # the one that Mapping has would catch a KeyError each time
        return self[group] if group in self._places else default

    def __iter__(self) -> Iterator[int]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)

    def record(self, group: int) -> bool:
        """A use. False when it is the group that was used last."""
        if self.at and self.uses[self.at - 1] == group:
            return False
        self.at += 1
        return True

    def upcoming(self) -> Iterator[int]:
        for place in range(self.at, self.at + len(self.uses)):
            yield self.uses[place % len(self.uses)]
