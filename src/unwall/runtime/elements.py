"""The elements of one parameter, out of a state that lies in groups and over ranks: this rank's part, or all of them.

A state is given as a function from a group to the flat tensor of its owned run (a gradient, a moment, the master).
"""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import nn

from unwall.runtime.places import Place
from unwall.shards.group import Group
from unwall.shards.local import distributed_like, local_part_of

if TYPE_CHECKING:
    from unwall.runtime.engine import Engine

RunOf = Callable[[Group], torch.Tensor]


class Part(NamedTuple):
    """Consecutive elements of a parameter that this rank keeps."""

    start: int
    """The first one, counted in the flattened parameter."""
    values: torch.Tensor
    """A flat view of the state."""


def param_of(engine: "Engine", places: tuple[Place, ...]) -> nn.Parameter:
    """The parameter that lies there."""
    return engine.groups[places[0].group].params[places[0].slot]


def shape_of(engine: "Engine", places: tuple[Place, ...]) -> torch.Size:
    """The shape of the parameter that lies there: all of it, over tensor ranks, too."""
    with torch._C.DisableTorchFunctionSubclass():
        return param_of(engine, places).shape


def _local_shape(engine: "Engine", places: tuple[Place, ...]) -> torch.Size:
    return engine.groups[places[0].group].layout.slots[places[0].slot].shape


def is_local(engine: "Engine", places: tuple[Place, ...]) -> bool:
    """Whether this rank keeps every element."""
    groups = (engine.groups[place.group] for place in places)
    return all(group.own_numel == group.layout.padded_numel for group in groups)


def parts_of(engine: "Engine", places: tuple[Place, ...], run_of: RunOf) -> Iterator[Part]:
    """What this rank keeps, without a copy. Each only until the next one is asked for: of a state on disk one group is in
    memory at a time."""
    for index, slot in places:
        group = engine.groups[index]
        segments = [segment for segment in group.owned_segments() if segment.slot == slot]
        run = run_of(group) if segments else None
        for segment in segments:
            assert run is not None
            yield Part(segment.start, run[segment.shard_start : segment.shard_start + segment.numel])


def part_of(engine: "Engine", places: tuple[Place, ...], run_of: RunOf) -> torch.Tensor:
    """This rank's elements as one flat tensor of their own, in the order of the parameter. It may be empty."""
    found = [Part(start, values.clone()) for start, values in parts_of(engine, places, run_of)]
    if not found:
        return run_of(engine.groups[places[0].group])[:0].clone()
    return (
        found[0].values if len(found) == 1 else torch.cat([part.values for part in sorted(found, key=lambda part: part.start)])
    )


def whole_of(engine: "Engine", places: tuple[Place, ...], run_of: RunOf) -> torch.Tensor:
    """Every element, on the device, in memory of its own: a DTensor for a parameter that is one. Where ranks keep parts all of
    them call it together."""
    return distributed_like(param_of(engine, places), _whole_of(engine, places, run_of))


def _whole_of(engine: "Engine", places: tuple[Place, ...], run_of: RunOf) -> torch.Tensor:
    shape, device = _local_shape(engine, places), engine.device.device
    if is_local(engine, places) and len(places) == 1:
        (part,) = parts_of(engine, places, run_of) if shape.numel() else (Part(0, run_of(engine.groups[places[0].group])[:0]),)
        return part.values.to(device, copy=True).view(shape)
    dtype = run_of(engine.groups[places[0].group]).dtype
    whole = torch.zeros(shape.numel(), dtype=dtype, device=device)
    for start, values in parts_of(engine, places, run_of):
        whole[start : start + values.numel()].copy_(values)
    if not is_local(engine, places) and whole.numel():
        engine.ranks.merge(whole)
    return whole.view(shape)


def put(engine: "Engine", places: tuple[Place, ...], run_of: RunOf, value: torch.Tensor) -> None:
    """Takes this rank's part of a whole value."""
    flat = local_part_of(param_of(engine, places), value).reshape(-1)
    for start, values in parts_of(engine, places, run_of):
        values.copy_(flat[start : start + values.numel()])


def put_part(engine: "Engine", places: tuple[Place, ...], run_of: RunOf, value: torch.Tensor) -> None:
    """The inverse of ``part_of``."""
    owned = [
        (segment.start, segment.numel)
        for index, slot in places
        for segment in engine.groups[index].owned_segments()
        if segment.slot == slot
    ]
    numel = sum(count for _, count in owned)
    if value.numel() != numel:
        raise ValueError(
            f"this rank keeps {numel} elements of the parameter, got {value.numel()}: take part(name) and change it"
        )
    flat = value.reshape(-1)
    for start, values in parts_of(engine, places, run_of):
        at = sum(count for other, count in owned if other < start)
        values.copy_(flat[at : at + values.numel()])
