"""Finding and converting the tensors inside whatever a module takes or returns."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

_DEPTH = 8


def tensors_in(value: Any, depth: int = _DEPTH) -> Iterator[torch.Tensor]:
    """Every tensor in nested containers, dataclasses and plain objects."""
    if isinstance(value, torch.Tensor):
        yield value
    elif depth == 0 or value is None or isinstance(value, str | bytes | int | float | torch.nn.Module):
        return
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item, depth - 1)
    elif isinstance(value, list | tuple | set | frozenset):
        for item in value:
            yield from tensors_in(item, depth - 1)
    elif hasattr(value, "__dict__"):
        for item in vars(value).values():
            yield from tensors_in(item, depth - 1)


def map_tensors(value: Any, change: Callable[[torch.Tensor], torch.Tensor], depth: int = _DEPTH) -> Any:
    """The same structure with every tensor changed; the very same object where nothing changed."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if depth == 0:
        return value
    if isinstance(value, tuple | list):
        items = [map_tensors(item, change, depth - 1) for item in value]
        if all(new is old for new, old in zip(items, value, strict=True)):
            return value
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, dict):
        changed = {key: map_tensors(item, change, depth - 1) for key, item in value.items()}
        if all(changed[key] is item for key, item in value.items()):
            return value
        if type(value) is dict:
            return changed
        for key, item in changed.items():  # a ModelOutput and its like: keep the type
            value[key] = item
        return value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        changes = {}
        for field in dataclasses.fields(value):
            old = getattr(value, field.name)
            new = map_tensors(old, change, depth - 1)
            if new is not old:
                changes[field.name] = new
        return dataclasses.replace(value, **changes) if changes else value
    return value


def cast_floats(value: Any, source: torch.dtype, target: torch.dtype) -> Any:
    """Tensors of one floating dtype to another; everything else as it is."""
    return map_tensors(value, lambda tensor: tensor.to(target) if tensor.dtype is source else tensor)
