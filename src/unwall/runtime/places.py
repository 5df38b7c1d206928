"""Where a parameter lies: in which groups, and in which of their slots."""

from collections.abc import Iterable
from typing import NamedTuple

from unwall.shards.group import Group


class Place(NamedTuple):
    """A slot of a group, by their numbers."""

    group: int
    slot: int


Places = dict[int, tuple[Place, ...]]
"""The places of each parameter, by its id."""


def find_places(groups: Iterable[Group]) -> Places:
    """Every place of every parameter, in the order of the groups."""
    found: dict[int, list[Place]] = {}
    for group in groups:
        for slot, param in enumerate(group.params):
            found.setdefault(id(param), []).append(Place(group.index, slot))
    return {key: tuple(places) for key, places in found.items()}
