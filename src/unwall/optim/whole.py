"""Optimizer states as whole tensors, parameter by parameter, in and out of shards."""

from collections.abc import Callable
from typing import Any

import torch

from unwall.optim.sharded import ShardedOptimizer
from unwall.runtime.whole import whole_run
from unwall.shards.group import Group


def whole_states(optimizer: ShardedOptimizer, names: tuple[str, ...]) -> dict[int, dict[str, Any]]:
    """State of every parameter that was stepped, by its number, as ``torch.optim`` counts. All ranks call it together."""
    found: dict[int, dict[str, Any]] = {}
    cached: tuple[Any, dict[str, torch.Tensor | None]] = (None, {})
    for number, param in enumerate(optimizer._params()):
        if "step" not in optimizer.state.get(param, {}):
            continue
        engine, group, slot = optimizer.place(param)
        if cached[0] is not group:
            dtype = torch.float64 if group.layout.dtype is torch.float64 else torch.float32
            cached = (group, {name: whole_run(engine, group, group.state(name, dtype)) for name in names})
        place = group.layout.slots[slot]
        entry: dict[str, Any] = {"step": torch.tensor(float(optimizer.state[param]["step"]))}
        for name, whole in cached[1].items():
            if whole is not None:
                entry[name] = whole[place.offset : place.end].view(place.shape).clone()
        if engine.ranks.rank == 0:
            found[number] = entry
    return found


def load_whole_states(
    optimizer: ShardedOptimizer,
    states: dict[int, dict[str, Any]],
    names: tuple[str, ...],
    tensors_of: Callable[[Group], tuple[torch.Tensor, ...]],
) -> None:
    """The inverse of ``whole_states``: every rank is given whole tensors and keeps its part."""
    for number, param in enumerate(optimizer._params()):
        if number not in states:
            continue
        _, group, slot = optimizer.place(param)
        entry = states[number]
        optimizer.state[param]["step"] = int(entry["step"])
        for name, target in zip(names, tensors_of(group), strict=True):
            if name not in entry:
                raise ValueError(
                    f"the optimizer state of parameter {number} has no {name!r}: give every rank the state_dict of rank 0"
                )
            source = entry[name].reshape(-1)
            for segment in group.owned_segments():
                if segment.slot == slot:
                    span = slice(segment.shard_start, segment.shard_start + segment.numel)
                    target[span].copy_(source[segment.start : segment.start + segment.numel])
