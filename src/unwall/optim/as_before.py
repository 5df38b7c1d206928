"""What a step finds out about its parameters, kept for the next one.

[Note: as before]
Which slots of which groups an optimizer's parameters have, how often each was updated, which runs of elements are updated with
the same numbers, in which stores they lie: a step asks all that, of each parameter, and the answers are those of the step
before until parameters, groups or states come, go or move. With a small model asking takes longer than the update. So each
answer is kept beside what it was made of, and holds for as long as that is the same. It keeps no memory and no model: what is
known of a group goes with the group, or when its states move, and tensors are not kept.
"""

import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from unwall.native.pool import AdamWStep
from unwall.optim.group_update import stores_of
from unwall.optim.measure import Held
from unwall.optim.param_check import GONE
from unwall.optim.runs import Run, runs_of
from unwall.runtime.engine import Engine
from unwall.runtime.hooks import engine_of, owners
from unwall.shards.group import Group
from unwall.shards.layout import SLOT_BYTES
from unwall.shards.states import StateKey
from unwall.shards.store import Store

if TYPE_CHECKING:
    from unwall.optim.sharded import ShardedOptimizer


@dataclass(eq=False)
class _Known:
    """What is known of one group."""

    group: weakref.ref[Group]
    """When that is gone, so is this."""
    slots: frozenset[int] = frozenset()
    """Of which ``counts`` and ``runs`` are."""
    asked: tuple[object, int] = (None, 0)
    """Whose parameters there were, and which version of the counts, when these were found."""
    counts: list[dict[str, Any]] = field(default_factory=list)
    """The numbers of each parameter, once."""
    alike: tuple[int, ...] = ()
    """For each param group the first one with the same numbers."""
    runs: list[tuple[int, int, int]] = field(default_factory=list)
    """Start, end and param group."""
    stores: dict[StateKey, Store] | None = None
    made_of: list[object] = field(default_factory=list)
    """What the group had, when ``stores`` was made."""


class AsBefore:
    """See [Note: as before]."""

    def __init__(self, optimizer: "ShardedOptimizer") -> None:
        self._optimizer = weakref.ref(optimizer)
        self._key: list[int] = []
        self._mine: list[list[tuple[int, frozenset[int]]]] = []
        """For each engine its groups, and which of their slots are the optimizer's."""
        self._rows: dict[int, int] = {}
        """The param group of each parameter (by id)."""
        self._groups: dict[int, _Known] = {}

    def held(self, engines: Sequence[Engine]) -> list[Held]:
        """Groups with gradients of the optimizer's parameters, and which slots those are."""
        there = [[gradient.known for gradient in engine.gradients] for engine in engines]
        if not any(map(any, there)):
            return []
        self.look(engines)
        found: list[Held] = []
        for engine, groups, slots_there in zip(engines, self._mine, there, strict=True):
            for index, slots in groups:
                both = slots_there[index] & slots
                if both:
                    found.append((engine, index, both))
        if len(engines) > 1:
            found.sort(key=lambda held: held[1])
        return found

    def look(self, engines: Sequence[Engine]) -> None:
        """At the parameters there are, before anything is asked about them."""
        optimizer = self._optimizer()
        assert optimizer is not None
        key = [owners.version]
        for engine in engines:
            key += id(engine), len(engine.groups), len(engine.places)
        for group in optimizer.param_groups:
            key += map(id, group["params"])
            key.append(0)
        if key == self._key:
            return
        mine: list[dict[int, set[int]]] = [{} for _ in engines]
        rows: dict[int, int] = {}
        for row, group in enumerate(optimizer.param_groups):
            for param in group["params"]:
                rows[id(param)] = row
                owner = engine_of(param)
                if owner is None:
                    raise RuntimeError(GONE)
                for index, slot in owner.places[id(param)]:
                    mine[_place_of(owner, engines)].setdefault(index, set()).add(slot)
        self._mine = [[(index, frozenset(slots)) for index, slots in sorted(groups.items())] for groups in mine]
        self._rows, self._key = rows, key

    # -- numbers ------------------------------------------------------------------------------------------------------

    def count(self, held: Iterable[Held]) -> None:
        """One more step of every parameter that is updated, in however many slots it lies."""
        found: dict[int, dict[str, Any]] = {}
        for engine, index, slots in held:
            for numbers in self._counted(engine.groups[index], slots).counts:
                found[id(numbers)] = numbers
        for numbers in found.values():
            numbers["step"] = numbers.get("step", 0) + 1

    def runs(self, group: Group, slots: set[int], rows: Sequence[AdamWStep], ahead: int) -> list[Run]:
        """The runs to update, keyed by the numbers of the step that comes ``ahead`` steps after the last one counted. ``rows``:
        the numbers of each param group."""
        known = self._counted(group, slots)
        gap = SLOT_BYTES // group.layout.dtype.itemsize
        steps = {numbers.get("step", 0) for numbers in known.counts}
        if len(steps) != 1:
            return runs_of(group.owned_segments(), self._keys(group, slots, rows, ahead), gap)
        alike = (0,) if len(rows) == 1 else tuple(map(rows.index, rows))
        if known.alike != alike:
            params = group.params
            found = runs_of(group.owned_segments(), {slot: alike[self._rows[id(params[slot])]] for slot in slots}, gap)
            known.runs = [(run.start, run.end, int(run.key)) for run in found]  # type: ignore[call-overload]
            known.alike = alike
        step = steps.pop() + ahead
        keys = {row: rows[row].at(step) for row in dict.fromkeys(row for *_, row in known.runs)}
        return [Run(start, end, keys[row]) for start, end, row in known.runs]

    def _keys(self, group: Group, slots: set[int], rows: Sequence[AdamWStep], ahead: int) -> dict[int, AdamWStep]:
        """The same where some parameters were updated more often than others."""
        optimizer = self._optimizer()
        assert optimizer is not None
        keys: dict[int, AdamWStep] = {}
        made: dict[tuple[int, int], AdamWStep] = {}
        with torch._C.DisableTorchFunctionSubclass():  # parameters of a class that asks are hashed
            for slot in slots:
                param = group.params[slot]
                row, step = self._rows[id(param)], optimizer.state[param].get("step", 0) + ahead
                key = made.get((row, step))
                if key is None:
                    key = made[row, step] = rows[row].at(step)
                keys[slot] = key
        return keys

    def _counted(self, group: Group, slots: set[int]) -> _Known:
        """With the counts of these slots."""
        known, optimizer = self._of(group), self._optimizer()
        assert optimizer is not None
        state = optimizer.state
        asked = (self._key, state.version)
        if known.slots == slots and known.asked[0] is asked[0] and known.asked[1] == asked[1]:
            return known
        with torch._C.DisableTorchFunctionSubclass():
            found = {id(numbers): numbers for numbers in (state[group.params[slot]] for slot in slots)}
        known.slots, known.asked = frozenset(slots), (self._key, state.version)
        known.counts, known.alike = list(found.values()), ()
        return known

    # -- tensors ------------------------------------------------------------------------------------------------------

    def stores(self, group: Group) -> dict[StateKey, Store]:
        """What an update of the group writes, where it lives. Not to be changed."""
        known = self._of(group)
        found, made_of = known.stores, _made_of(group)
        if found is None or known.made_of != made_of:
            optimizer = self._optimizer()
            assert optimizer is not None
            found = known.stores = stores_of(group, optimizer.rule, optimizer.own)
            known.made_of = _made_of(group)
        return found

    def forget(self, engine: Engine) -> None:
        """The engine's states are about to live elsewhere."""
        for group in engine.groups:
            self._groups.pop(id(group), None)

    def _of(self, group: Group) -> _Known:
        known = self._groups.get(id(group))
        if known is None:
            known = self._groups[id(group)] = _Known(_watched(group, self._groups))
        return known


def _place_of(owner: Engine, engines: Sequence[Engine]) -> int:
    for place, engine in enumerate(engines):
        if engine is owner:
            return place
    raise RuntimeError(
        "a parameter of another sharded model was put into optimizer.param_groups by hand: call add_param_group, or build "
        "another optimizer"
    )


def _made_of(group: Group) -> list[object]:
    """What says which stores a group has. By their ids: those that an optimizer needs are kept with what is compared."""
    return [id(group.param), group.lean, *group.states, *map(id, group.states.values())]


def _watched(group: Group, known: dict[int, _Known]) -> "weakref.ref[Group]":
    """What is known of a group goes with it, and with its states."""
    key = id(group)
    return weakref.ref(group, lambda _: known.pop(key, None))
