"""What to hold on the device: caching with a known future. Pure functions.

With the order of uses known, dropping what is needed furthest ahead is optimal (Belady), and what to fetch ahead is the next
missing group, as long as it does not push out anything that is needed sooner.
"""

from collections.abc import Container, Iterable, Mapping
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


def next_missing(upcoming: Iterable[int], present: Container[int], look_ahead: int) -> tuple[int, int] | None:
    """The first group among the next ``look_ahead`` uses that is not present, and how many uses ahead it is."""
    for distance, group in enumerate(upcoming):
        if distance >= look_ahead:
            return None
        if group not in present:
            return group, distance
    return None
