"""Which states a load reads once, and which twice. See [Note: once] in waiting.py."""

from collections import defaultdict
from collections.abc import Iterator, Mapping

from unwall.checkpoint.lots import Held
from unwall.checkpoint.manifest import Tensor
from unwall.checkpoint.matching import Matched
from unwall.checkpoint.restoring import Restorer, lacks_master, master_homes
from unwall.checkpoint.trained import Trained
from unwall.checkpoint.waiting import Home, Room, Waiting
from unwall.optim.adamw import AdamW
from unwall.optim.seen_states import SeenState, seen_specs, seen_states
from unwall.optim.sharded import ShardedOptimizer
from unwall.optim.wrap import Wrapped
from unwall.runtime.engine import Engine
from unwall.shards.group import Group

Key = tuple[int, str, str]
"""A state of a group: its index, the optimizer and the state."""
MASTER = ("", "")
"""Which is no optimizer's state."""


def read_once(engine: Engine, restorer: Restorer, matched: Matched, optimizers: Trained) -> dict[Key, Waiting]:
    """In the order of the model, which is that of the files. Changes nothing but what the tiers have to spare."""
    room, found = Room(engine.tiers), {}
    for group in engine.groups:
        waiting = _master(restorer, room, group, masters(group, matched))
        if waiting is not None:
            found[group.index, *MASTER] = waiting
        for name, optimizer in optimizers.items():
            if not _keeps(optimizer, group) or _changes(name, optimizer, matched):
                continue
            for state, tensors in states_of(group, matched, name, optimizer):
                waiting = _state(restorer, room, group, state, tensors, _is_fresh(optimizer))
                if waiting is not None:
                    found[group.index, name, state.spec.name] = waiting
    return found


def read_again(engine: Engine, matched: Matched, once: Mapping[Key, Waiting]) -> list[Tensor]:
    """What is not read once, or not by everyone who needs a part of it: to be verified before."""
    states: dict[int, list[tuple[tuple[str, str], Tensor]]] = defaultdict(list)
    for (number, called, state), tensor in matched.states.items():
        states[number].append(((called, state), tensor))
    again, known = {}, set()
    for group in engine.groups:
        for param in group.params:
            for name, tensor in [(MASTER, matched.params[id(param)]), *states[id(param)]]:
                known.add(id(tensor))
                if (group.index, *name) not in once:
                    again[id(tensor)] = tensor
    return [tensor for tensor in matched.tensors if id(tensor) in again or id(tensor) not in known]


def masters(group: Group, matched: Matched) -> dict[int, Tensor]:
    """Of each slot its parameter in the checkpoint."""
    return {slot: matched.params[id(param)] for slot, param in enumerate(group.params)}


def states_of(
    group: Group, matched: Matched, called: str, optimizer: ShardedOptimizer
) -> Iterator[tuple[SeenState, dict[int, Tensor]]]:
    """Every state that an optimizer keeps of a group, and of each slot that is in the checkpoint its tensor."""
    names = [spec.name for spec in seen_specs(optimizer.rule, group)]
    stepped = any((id(param), called, name) in matched.states for param in group.params for name in names)
    for state in seen_states(optimizer.rule, optimizer.own, group) if _keeps(optimizer, group) or stepped else ():
        found = {slot: matched.states.get((id(param), called, state.spec.name)) for slot, param in enumerate(group.params)}
        yield state, {slot: tensor for slot, tensor in found.items() if tensor is not None}


def _keeps(optimizer: ShardedOptimizer, group: Group) -> bool:
    """Not of frozen parameters."""
    return any(key.owner == optimizer.own.owner for key in group.states)


def _changes(called: str, optimizer: ShardedOptimizer, matched: Matched) -> bool:
    """The saved options ask for states that the optimizer does not keep yet."""
    if not isinstance(optimizer, Wrapped):
        return False
    mine = ((param, name) for param, owner, name in matched.states if owner == called)
    return any(name not in optimizer.rule.kept[param] for param, name in mine)


def _is_fresh(optimizer: ShardedOptimizer) -> bool:
    """All of its states have their first value."""
    stepped = any("step" in entry for entry in optimizer.state.values())
    return isinstance(optimizer, AdamW) and not stepped and not optimizer.own.touched


def _master(restorer: Restorer, room: Room, group: Group, tensors: dict[int, Tensor]) -> Waiting | None:
    if lacks_master(group, tensors):
        return None
    homes = master_homes(group)
    if not restorer.master(group, tensors, [home.held for home in homes]).exact:
        return None
    spares = room.spares(homes)
    return None if spares is None else Waiting(restorer.master(group, tensors, [spare.held for spare in spares]), spares)


def _state(
    restorer: Restorer, room: Room, group: Group, state: SeenState, tensors: dict[int, Tensor], fresh: bool
) -> Waiting | None:
    goal = restorer.state(group, tensors, state, Held.of(state.store))
    if state.coded or not goal.exact:
        return None
    if fresh:
        return Waiting(goal, None)
    spares = room.spares([Home.of(state.store)])
    return None if spares is None else Waiting(restorer.state(group, tensors, state, spares[0].held), spares)
