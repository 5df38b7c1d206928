"""Optimizer states as whole tensors, parameter by parameter, in and out of shards."""

import itertools
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from unwall.optim.sharded import ShardedOptimizer
from unwall.runtime.engine import discarded
from unwall.runtime.whole import whole_run
from unwall.shards.group import Group
from unwall.shards.store import Store


class OwnStates:
    """The states that one optimizer keeps in groups, under names of its own: another optimizer over the same parameters has
    others. They go with the optimizer."""

    def __init__(self, names: tuple[str, ...], number: int) -> None:
        self.names = names
        self._number = number
        self._groups: weakref.WeakSet[Group] = weakref.WeakSet()  # what outlives its model must not keep it

    def tensor(self, group: Group, name: str, dtype: torch.dtype, write: bool = True) -> torch.Tensor:
        """A state over a group's owned run, zeros at first use."""
        return self.store(group, name, dtype).tensor(write)

    def store(self, group: Group, name: str, dtype: torch.dtype) -> Store:
        """The same where it lives."""
        self._groups.add(group)
        return group.store(f"{name}#{self._number}", dtype)

    def free(self) -> None:
        for group in list(self._groups):
            try:
                group.finish_update()
            except Exception:  # reported where the group is used next; tried again there, for which the states are needed
                discarded.append(self.free)
                return
            for name in self.names:
                if group.has_state(f"{name}#{self._number}"):
                    group.free_state(f"{name}#{self._number}")
            self._groups.discard(group)


_count = itertools.count()


def own_states(optimizer: ShardedOptimizer, names: tuple[str, ...]) -> OwnStates:
    """Room for an optimizer's states. Freed when the optimizer is."""
    states = OwnStates(names, next(_count))
    weakref.finalize(optimizer, discarded.append, states.free).atexit = False
    return states


def whole_states(optimizer: ShardedOptimizer, kept: OwnStates) -> dict[int, dict[str, Any]]:
    """State of every parameter that was stepped, by its number, as ``torch.optim`` counts. All ranks call it together."""
    for engine in optimizer.engines():
        engine.executor.together()
    found: dict[int, dict[str, Any]] = {}
    cached: tuple[Any, dict[str, torch.Tensor | None]] = (None, {})
    for number, param in enumerate(optimizer._params()):
        if "step" not in optimizer.state.get(param, {}):
            continue
        engine, group, slot = optimizer.place(param)
        if cached[0] is not group:
            dtype = torch.float64 if group.layout.dtype is torch.float64 else torch.float32
            cached = (
                group,
                {name: whole_run(engine, group, kept.tensor(group, name, dtype, write=False)) for name in kept.names},
            )
        place = group.layout.slots[slot]
        entry: dict[str, Any] = {"step": torch.tensor(float(optimizer.state[param]["step"]))}
        for name, whole in cached[1].items():
            if whole is not None:
                entry[name] = whole[place.offset : place.end].view(place.shape).clone()
        if engine.ranks.rank == 0:
            found[number] = entry
    return found


def from_rank_0(optimizer: ShardedOptimizer, states: dict[int, dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """Rank 0's states on every rank, whatever the others were given (``state_dict`` gives states on rank 0 only)."""
    engines = optimizer.engines()
    if not engines or engines[0].ranks.size == 1:
        return states
    ranks, device = engines[0].ranks, engines[0].device.device
    engines[0].executor.together()
    outline = {
        number: {name: _Outline(value.shape, value.dtype) if _is_large(value) else value for name, value in entry.items()}
        for number, entry in states.items()
    }
    shared: dict[int, dict[str, Any]] = ranks.broadcast_object(outline)
    for number, entry in shared.items():
        for name, value in entry.items():
            if isinstance(value, _Outline):
                mine = states[number][name] if ranks.rank == 0 else torch.empty(value.shape, dtype=value.dtype)
                moved = mine.to(device).contiguous()
                ranks.broadcast(moved)
                entry[name] = moved.cpu()
    return shared


class _Outline(NamedTuple):
    shape: torch.Size
    dtype: torch.dtype


def _is_large(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() > 0


def load_whole_states(
    optimizer: ShardedOptimizer,
    states: dict[int, dict[str, Any]],
    names: tuple[str, ...],
    tensors_of: Callable[[Group], tuple[torch.Tensor, ...]],
) -> None:
    """The inverse of ``whole_states``: every rank has the whole tensors (``from_rank_0``) and keeps its part."""
    for number, param in enumerate(optimizer._params()):
        _, group, slot = optimizer.place(param)
        if number not in states:
            if "step" not in optimizer.state.pop(param, {}):
                continue  # it never had any
            for segment in group.owned_segments():
                if segment.slot == slot:
                    for target in tensors_of(group):
                        target[segment.shard_start : segment.shard_start + segment.numel].zero_()
            continue
        group.generation += 1
        entry = states[number]
        optimizer.state[param]["step"] = int(entry["step"])
        for name, target in zip(names, tensors_of(group), strict=True):
            if name not in entry:
                raise ValueError(f"the optimizer state of parameter {number} has no {name!r}: it comes from another optimizer")
            source = entry[name].reshape(-1)
            for segment in group.owned_segments():
                if segment.slot == slot:
                    span = slice(segment.shard_start, segment.shard_start + segment.numel)
                    target[span].copy_(source[segment.start : segment.start + segment.numel])
