"""The states that one optimizer keeps in groups."""

import itertools
import weakref
from collections.abc import Sequence

from unwall.runtime.engine import Engine
from unwall.runtime.hooks import engine_of
from unwall.runtime.leftovers import Leftovers
from unwall.shards.group import Group
from unwall.shards.states import GROUP, StateKey, StateSpec
from unwall.shards.store import Store


class OwnStates:
    """The states that one optimizer keeps in groups, under keys of its own: another optimizer over the same parameters has
    others. They go with the optimizer."""

    def __init__(self, optimizer: object, owner: int) -> None:
        self.owner = owner
        self.touched = False
        """Whether one was set by hand: then they have not their first values, even before the first step."""
        self._leftovers = Leftovers(optimizer, self.free)
        self._groups: weakref.WeakSet[Group] = weakref.WeakSet()  # what outlives its model must not keep it

    def stores(self, group: Group, specs: Sequence[StateSpec]) -> dict[StateKey, Store]:
        """States over a group's owned run, where they live. They come into being at first use."""
        if group not in self._groups:
            self._groups.add(group)
            self._leftovers.note(_engine(group))
        return {spec.key(self.owner): group.store(spec, self.owner) for spec in specs}

    def free(self, engine: Engine) -> None:
        """Gives back the states of the groups of one engine."""
        for group in [group for group in self._groups if _engine(group) is engine]:
            try:
                group.pending.settle()
            except Exception:  # the next use of the group reports it and tries again, which needs the states
                engine.discarded.append(self.free)
                return
            for key in [key for key in group.states if key.owner == self.owner]:
                group.free_state(key)
            self._groups.discard(group)


_count = itertools.count(GROUP + 1)


def own_states(optimizer: object) -> OwnStates:
    """Room for an optimizer's states. Freed when the optimizer is."""
    return OwnStates(optimizer, next(_count))


def _engine(group: Group) -> Engine:
    engine = engine_of(group.params[0])
    assert engine is not None
    return engine
