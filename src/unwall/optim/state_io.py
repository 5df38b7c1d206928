"""Optimizer states as whole tensors, parameter by parameter, in and out of shards. Generic over what states a rule keeps."""

from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from unwall.optim.option_check import check_finite, check_options, check_step
from unwall.optim.seen_states import seen_specs, seen_states
from unwall.optim.sharded import ShardedOptimizer
from unwall.runtime.engine import Engine
from unwall.runtime.whole import whole_run
from unwall.shards.collectives import Ranks
from unwall.shards.dimensions import same_model
from unwall.shards.group import Group
from unwall.shards.local import is_distributed, local_part_of, whole_over_tensor_ranks


class _Member(NamedTuple):
    """A parameter of an optimizer, in its group."""

    number: int
    """As ``torch.optim`` counts."""
    param: nn.Parameter
    slot: int


def _by_group(optimizer: ShardedOptimizer) -> Iterator[tuple[Engine, Group, list[_Member]]]:
    """The groups that hold this optimizer's parameters, in the order of the parameters."""
    found: dict[int, tuple[Engine, Group, list[_Member]]] = {}
    for number, param in enumerate(optimizer._params()):
        for engine, group, slot in optimizer.places(param):
            found.setdefault(id(group), (engine, group, []))[2].append(_Member(number, param, slot))
    yield from found.values()


def whole_states(optimizer: ShardedOptimizer) -> dict[int, dict[str, Any]]:
    """State of every parameter that was stepped, by its number, as ``torch.optim`` counts. All ranks call it together."""
    for engine in optimizer.engines():
        engine.executor.together("state_dict of the optimizer")
    found: dict[int, dict[str, Any]] = {}
    for engine, group, members in _by_group(optimizer):
        stepped = [member for member in members if "step" in optimizer.state.get(member.param, {})]
        if not stepped:
            continue
        for number, param, _ in stepped:
            found.setdefault(number, {"step": torch.tensor(float(optimizer.state[param]["step"]))})
        for state in seen_states(optimizer.rule, optimizer.own, group):
            with engine.executor.prepared("state_dict of the optimizer"):
                owned = state.read()
            whole = whole_run(engine, group, owned)
            for number, _, slot in stepped:
                if whole is not None:
                    place = group.layout.slots[slot]
                    if state.spec.name not in found[number]:
                        found[number][state.spec.name] = torch.empty(place.shape, dtype=whole.dtype)
                    place.range_of(found[number][state.spec.name].view(-1)).copy_(whole[place.offset : place.end])
            state.store.go_back()  # one state of one group is out at a time
    _join_tensor_ranks(optimizer, found)
    first = all(engine.is_first for engine in optimizer.engines())
    return {number: found[number] for number in sorted(found)} if first else {}


def _join_tensor_ranks(optimizer: ShardedOptimizer, found: dict[int, dict[str, Any]]) -> None:
    """States of DTensors, of which each tensor rank has its part."""
    for number, param in enumerate(optimizer._params()):
        for name, value in found.get(number, {}).items() if is_distributed(param) else ():
            if _is_large(value):
                device = optimizer._engine_of(param).device.device
                found[number][name] = whole_over_tensor_ranks(param, value.to(device)).cpu()


def from_rank_0(optimizer: ShardedOptimizer, state_dict: dict[str, Any]) -> dict[int, dict[str, Any]]:
    """Rank 0's states on every rank, whatever the others were given (``state_dict`` gives states on rank 0 only). The options,
    which each rank has its own of, are looked at before."""
    engines = optimizer.engines()
    with engines[0].executor.prepared("load_state_dict of the optimizer") if engines else nullcontext():
        check_options(optimizer.param_groups, optimizer.defaults, state_dict)
    keys = (key for group in state_dict["param_groups"] for key in group["params"])
    numbers = {key: number for number, key in enumerate(keys)}  # as in torch their order counts, whatever they are called
    states: dict[int, dict[str, Any]] = {numbers.get(key, key): entry for key, entry in state_dict["state"].items()}
    for ranks in same_model(engines[0].ranks, engines[0].others) if engines else ():
        states = _broadcast(ranks, states, engines[0].device.device)
    return states


def _broadcast(ranks: Ranks, states: dict[int, dict[str, Any]], device: torch.device) -> dict[int, dict[str, Any]]:
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


def check_states(optimizer: ShardedOptimizer, states: dict[int, dict[str, Any]], strict: bool = True) -> None:
    """ValueError, before anything is changed, where states are missing, of another shape, or of parameters there are none of.

    ``strict``: a state of the rule that is missing is an error."""
    params = list(optimizer._params())
    unknown = sorted((number for number in states if number not in range(len(params))), key=str)
    if unknown:
        raise ValueError(f"the optimizer state has parameter {unknown[0]}, but this optimizer has only {len(params)}")
    for _, group, members in _by_group(optimizer):
        for number, param, slot in members:
            entry, shape = states.get(number), param.shape
            if entry is None:
                continue
            name = group.layout.slots[slot].name
            for state in ("step", *(spec.name for spec in seen_specs(optimizer.rule, group))):
                what = f"the optimizer state {state!r} of parameter {number} ({name})"
                if state not in entry:
                    if strict or state == "step":
                        raise ValueError(
                            f"the optimizer state of parameter {number} ({name}) has no {state!r}: it comes from another "
                            "optimizer"
                        )
                elif state == "step":
                    check_step(what, entry[state])
                elif not isinstance(entry[state], torch.Tensor) or entry[state].shape != shape:
                    got = tuple(entry[state].shape) if isinstance(entry[state], torch.Tensor) else entry[state]
                    raise ValueError(
                        f"{what} has shape {got}, expected {tuple(shape)}: it comes from another model, or the parameters are "
                        "in another order"
                    )
                else:
                    check_finite(what, entry[state])


def load_whole_states(optimizer: ShardedOptimizer, states: dict[int, dict[str, Any]]) -> None:
    """The inverse of ``whole_states``: every rank has the whole tensors (``from_rank_0``) and keeps its part.

    A state that is missing begins anew, as for parameters that are not there; ``check_states`` comes first.
    """
    left: list[_Member] = []
    for _, group, members in _by_group(optimizer):
        touched = [member for member in members if member.number in states or "step" in optimizer.state.get(member.param, {})]
        if not touched:
            continue  # they never had any
        group.generation += 1
        for state in seen_states(optimizer.rule, optimizer.own, group):
            values = {slot: states.get(number, {}).get(state.spec.name, state.spec.initial) for number, _, slot in touched}
            state.change(partial(_put_all, group, values))
            state.store.go_back()
        left += touched
    for number, param, _ in left:
        if number in states:
            optimizer.state[param]["step"] = int(states[number]["step"])
        else:
            optimizer.state.leave_out(param)


def _put_all(group: Group, values: dict[int, torch.Tensor | float], target: torch.Tensor) -> None:
    for slot, value in values.items():
        put_whole_state(group, slot, target, value)


def put_whole_state(group: Group, slot: int, target: torch.Tensor, value: torch.Tensor | float) -> None:
    """Sets this rank's part of a parameter's state to a part of the whole value, or to one number."""
    if isinstance(value, torch.Tensor):
        value = local_part_of(group.params[slot], value)
    for segment in group.owned_segments():
        if segment.slot == slot:
            span = target[segment.shard_start : segment.shard_start + segment.numel]
            if isinstance(value, torch.Tensor):
                span.copy_(value.reshape(-1)[segment.start : segment.start + segment.numel])
            else:
                span.fill_(value)
