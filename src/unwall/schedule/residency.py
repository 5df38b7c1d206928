"""What to hold on the device: caching with a known future. Pure functions.

With the order of uses known, dropping what is needed furthest ahead is optimal (Belady), and what to fetch ahead is the next
missing group, as long as it does not push out anything that is needed sooner.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Held:
    """A group that occupies memory."""

    group: int
    nbytes: int
    pinned: bool
    """In use: must not be dropped."""


def choose_drops(
    held: Iterable[Held], next_use: Mapping[int, int], needed_bytes: int, sooner_than: int | None = None
) -> list[int] | None:
    """Which groups to drop so that ``needed_bytes`` become free: those needed furthest ahead, the unknown ones first.

    ``sooner_than``: groups that are needed at this distance or sooner stay (a fetch ahead must not push out what is used
    first). None when it cannot be done.
    """
    if needed_bytes <= 0:
        return []
    never = float("inf")
    candidates = [entry for entry in held if not entry.pinned and entry.nbytes > 0]
    if sooner_than is not None:
        candidates = [entry for entry in candidates if next_use.get(entry.group, never) > sooner_than]
    candidates.sort(key=lambda entry: (-next_use.get(entry.group, never), entry.group))
    chosen = []
    for entry in candidates:
        chosen.append(entry.group)
        needed_bytes -= entry.nbytes
        if needed_bytes <= 0:
            return chosen
    return None


def next_missing(upcoming: Iterable[int], present: set[int], look_ahead: int) -> tuple[int, int] | None:
    """The first group among the next ``look_ahead`` uses that is not present, and how many uses ahead it is."""
    for distance, group in enumerate(upcoming):
        if distance >= look_ahead:
            return None
        if group not in present:
            return group, distance
    return None
