"""What to hold on the device: caching with a known future. Pure functions.

With the order of uses known, dropping what is needed furthest ahead is optimal (Belady), and what to fetch ahead is the next
missing group, as long as it does not push out anything that is needed sooner.

[Note: how far ahead]
What counts is what is missing, not how many uses away it is: a model with adapters goes back and forth between a layer's group
and that of the adapters, and the next layer is many uses ahead. So the next missing groups of this pass are fetched, as many at
once as keep the link busy (``may_fetch_ahead``). Beyond the end of the pass only the next few uses count: a step may come
between, and what it updates would have been fetched in vain. Nothing here looks at a clock, so all ranks decide alike.
"""

from collections.abc import Collection, Container, Iterable, Mapping
from typing import NamedTuple


class Occupant(NamedTuple):
    """A group that occupies device memory."""

    group: int
    nbytes: int
    pinned: bool
    """In use: must not be dropped."""


def choose_drops(
    occupants: Iterable[Occupant], next_use: Mapping[int, int], needed_bytes: int, sooner_than: int | None = None
) -> list[int] | None:
    """Which groups to drop so that ``needed_bytes`` become free: those needed furthest ahead, the unknown ones first.

    ``sooner_than``: groups that are needed at this distance or sooner stay (a fetch ahead must not push out what is used
    first). None when it cannot be done.
    """
    if needed_bytes <= 0:
        return []
    never = float("inf")
    candidates = [
        (-next_use.get(occupant.group, never), occupant.group, occupant.nbytes)
        for occupant in occupants
        if not occupant.pinned and occupant.nbytes > 0
    ]
    if sooner_than is not None:
        candidates = [candidate for candidate in candidates if -candidate[0] > sooner_than]
    candidates.sort()
    chosen = []
    for _, group, nbytes in candidates:
        chosen.append(group)
        needed_bytes -= nbytes
        if needed_bytes <= 0:
            return chosen
    return None


def next_missing(upcoming: Iterable[int], present: Container[int], first: int = 0) -> tuple[int, int] | None:
    """The first of the ``upcoming`` groups that is not present, and how many uses ahead it is. ``first``: how many uses ahead
    the first of them is."""
    for distance, group in enumerate(upcoming, first):
        if group not in present:
            return group, distance
    return None


def may_fetch_ahead(ahead: Collection[int], amount: int, largest: int, most: int) -> bool:
    """Whether another group of ``amount`` may be on its way, beside what was fetched ``ahead`` and is not used yet: up to
    ``most`` groups or, where they are small, up to what so many of the ``largest`` would be."""
    return len(ahead) < most or (most > 0 and sum(ahead) + amount <= most * largest)
