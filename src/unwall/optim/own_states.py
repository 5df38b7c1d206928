"""The states that one optimizer keeps in groups."""

import itertools
import weakref
from collections.abc import Sequence

from unwall.runtime.engine import discarded
from unwall.shards.group import Group
from unwall.shards.states import GROUP, StateKey, StateSpec
from unwall.shards.store import Store


class OwnStates:
    """The states that one optimizer keeps in groups, under keys of its own: another optimizer over the same parameters has
    others. They go with the optimizer."""

    def __init__(self, owner: int) -> None:
        self.owner = owner
        self._groups: weakref.WeakSet[Group] = weakref.WeakSet()  # what outlives its model must not keep it

    def stores(self, group: Group, specs: Sequence[StateSpec]) -> dict[StateKey, Store]:
        """States over a group's owned run, where they live. They come into being at first use."""
        self._groups.add(group)
        return {spec.key(self.owner): group.store(spec, self.owner) for spec in specs}

    def free(self) -> None:
        for group in list(self._groups):
            try:
                group.pending.settle()
            except Exception:  # reported where the group is used next; tried again there, for which the states are needed
                discarded.append(self.free)
                return
            for key in [key for key in group.states if key.owner == self.owner]:
                group.free_state(key)
            self._groups.discard(group)


_count = itertools.count(GROUP + 1)


def own_states(optimizer: object) -> OwnStates:
    """Room for an optimizer's states. Freed when the optimizer is."""
    states = OwnStates(next(_count))
    weakref.finalize(optimizer, discarded.append, states.free).atexit = False
    return states
