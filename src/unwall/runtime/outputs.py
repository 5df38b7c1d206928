"""Finding and converting the tensors inside whatever a module takes or returns."""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import ModuleType
from typing import Any

import torch

_DEPTH = 8
_WITHOUT_PARTS = (str, bytes, int, float, type, ModuleType, torch.nn.Module)


def tensors_in(value: Any, depth: int = _DEPTH) -> Iterator[torch.Tensor]:
    """Every tensor in nested containers, dataclasses and plain objects, once, those nearest to the surface first.

    Level by level, so that what is reachable in several ways is met at its smallest depth and looked at only once."""
    if isinstance(value, torch.Tensor):
        yield value
        return
    level = [value]
    seen = {id(value): value}  # the object, too: while it lives no other gets its id
    for remaining in range(depth, -1, -1):
        below: list[Any] = []
        for item in level:
            if isinstance(item, torch.Tensor):
                yield item
            elif remaining:
                for part in _parts(item):
                    if id(part) not in seen:
                        seen[id(part)] = part
                        below.append(part)
        level = below


def _parts(value: Any) -> Iterable[Any]:
    """What a container or an object holds. Nothing of a module, a class or a library: they are not part of a result."""
    if value is None or isinstance(value, _WITHOUT_PARTS):
        return ()
    if isinstance(value, Mapping):
        return value.values()
    if isinstance(value, list | tuple | set | frozenset):
        return value
    held: dict[str, Any] = getattr(value, "__dict__", {})
    return held.values()


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


def cast_all_floats(value: Any, target: torch.dtype) -> Any:
    """Tensors of any floating dtype to one; everything else as it is."""
    return map_tensors(value, lambda tensor: tensor.to(target) if tensor.is_floating_point() else tensor)


def cast_floats(value: Any, source: torch.dtype, target: torch.dtype) -> Any:
    """Tensors of one floating dtype to another; everything else as it is."""
    return map_tensors(value, lambda tensor: tensor.to(target) if tensor.dtype is source else tensor)
