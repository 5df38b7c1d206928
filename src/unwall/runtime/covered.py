"""Calls that count as one where groups come and go.

[Note: covered calls]
Where groups come and go there is work per group, not per module. A call of a module whose whole subtree lies in one group, or
alternates between two (a layer and the adapters of all layers), reads all of it when it begins, and *covers* the calls inside:
their hooks return at once, and its backward is followed as one. What else is looked up inside is read as ever, by the call that
covers; such a module does not cover again, nor does one whose output cannot be followed. At most two groups are held for it,
with those of the calls around it: what every accepted budget has room for. Calls inside a backward do not cover.
"""

import itertools
import weakref
from collections.abc import Iterable, Sequence

from torch import nn

from unwall.runtime.calls import Frame
from unwall.runtime.places import Places

AT_ONCE = 2
"""Groups that calls on the stack may hold so that one of them covers: see ``working_bytes`` in shards/working.py."""


class Covered:
    """The call on a model's stack that covers those inside it, if there is one. See [Note: covered calls]."""

    __slots__ = ("_apart", "_sets", "frame", "groups")

    def __init__(self) -> None:
        self.frame: Frame | None = None
        self.groups: frozenset[int] = frozenset()
        """What it has read for them. One and the same set whenever a module with the same groups covers."""
        self._sets: dict[tuple[int, ...], frozenset[int]] = {}
        self._apart: weakref.WeakSet[nn.Module] = weakref.WeakSet()

    def may_begin(self, frame: Frame, frames: Iterable[Frame], groups: tuple[int, ...]) -> bool:
        """Whether a call can cover what it calls. ``frames``: all on the stack. ``groups``: of all below it."""
        if self.frame is not None or frame.module in self._apart:
            return False
        return len({*groups, *(index for around in frames for index in around.groups)}) <= AT_ONCE

    def begin(self, frame: Frame, groups: tuple[int, ...]) -> None:
        """The call has read its groups."""
        frame.covers, self.frame = True, frame
        self.groups = self._sets.setdefault(groups, frozenset(groups))

    def end(self) -> None:
        self.frame = None

    def never_again(self, frame: Frame) -> None:
        """A call reads more than its module has, or cannot be followed as one."""
        if frame.covers:
            self._apart.add(frame.module)


def groups_to_cover(modules: Sequence[tuple[nn.Module, bool]], places: Places) -> dict[int, tuple[int, ...]]:
    """The modules that may cover those below them, by their ids, and the groups of all that. ``modules``: each before those
    below it, and whether it counts as a whole."""
    orders: dict[int, tuple[int, ...]] = {}
    """The groups that the calls of a module and of all below it read, in order. None where they are too many."""
    found = {}
    for module, unit in reversed(modules):
        own, below = tuple(module.parameters(recurse=unit)), [] if unit else list(module.children())
        if any(len(places.get(id(param), ())) > 1 for param in own) or any(id(child) not in orders for child in below):
            continue  # tiles; or a child that is below a later module, too
        groups = [place.group for param in own for place in places.get(id(param), ())]
        for child in below:
            groups += orders[id(child)]
        order = tuple(group for group, _ in itertools.groupby(groups))
        if len(set(order)) > AT_ONCE:
            continue
        orders[id(module)] = order
        if below and (len(order) == 1 or len(order) > 3):  # one group, or two in turn
            found[id(module)] = tuple(dict.fromkeys(order))
    return found
