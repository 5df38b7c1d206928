"""Nested values as JSON, with the tensors in them put aside.

Dicts with string keys, lists, strings, numbers, booleans and None are themselves. What JSON does not have is a dict with one
key that begins with ``$``: ``{"$tuple": [...]}``, ``{"$dict": [[key, value], ...]}`` (other keys than strings, or one that
begins with ``$``), ``{"$counter": ...}``, ``{"$float": "nan"}``, ``{"$bytes": "hex"}`` and ``{"$tensor": "its name"}``.
"""

import collections
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

Keep = Callable[[str, torch.Tensor], str]
"""Takes a tensor, and where in the tree it is, and gives the name under which it can be found again."""


DEEPEST = 100
"""So many lists and dicts may lie in one another. Whoever reads a checkpoint may have little of a stack left."""


def encode(value: Any, where: str, keep: Keep, depth: int = 0) -> Any:
    """A value as JSON. TypeError, naming ``where``, for what cannot be written without pickling it."""
    if depth > DEEPEST:
        raise TypeError(f"{where[:60]}... is nested more than {DEEPEST} deep, which a checkpoint does not hold: a loop?")
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, torch.Tensor | np.ndarray):
        return {"$tensor": keep(where, _checked(torch.as_tensor(value).detach(), where))}
    if isinstance(value, np.generic) and not isinstance(value.item(), np.generic):  # a longdouble stays one
        return encode(value.item(), where, keep)
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"$float": repr(float(value))}
    if isinstance(value, bytes | bytearray):
        return {"$bytes": bytes(value).hex()}
    if isinstance(value, list | tuple) and type(value) in (list, tuple, torch.Size):
        items = [encode(item, f"{where}[{at}]", keep, depth + 1) for at, item in enumerate(value)]
        return items if isinstance(value, list) else {"$tuple": items}
    if isinstance(value, dict):
        return _encode_dict(value, where, keep, depth + 1)
    raise TypeError(
        f"{where} is a {type(value).__name__}, which a checkpoint does not hold (nothing in it is pickled): give numbers, "
        "strings, tensors, or lists and dicts of them, a state_dict() for instance"
    )


def _checked(tensor: torch.Tensor, where: str) -> torch.Tensor:
    """TypeError for a tensor that has no plain bytes."""
    kind = "nested" if tensor.is_nested else "quantised" if tensor.is_quantized else "meta" if tensor.is_meta else None
    if kind is None and tensor.layout is not torch.strided:
        kind = str(tensor.layout).removeprefix("torch.")
    if kind is not None:
        raise TypeError(f"{where} is a {kind} tensor, which a checkpoint does not hold: give dense tensors with values")
    return tensor


def _encode_dict(value: dict[Any, Any], where: str, keep: Keep, depth: int) -> Any:
    plain = all(isinstance(key, str) and not key.startswith("$") for key in value)
    if plain and not isinstance(value, collections.Counter):
        return {key: encode(item, f"{where}.{key}", keep, depth) for key, item in value.items()}
    rows = [
        [encode(key, f"a key of {where}", keep, depth), encode(item, f"{where}[{key!r}]", keep, depth)]
        for key, item in value.items()
    ]
    return {"$counter" if isinstance(value, collections.Counter) else "$dict": rows}


def decode(tree: Any, get: Callable[[str], torch.Tensor]) -> Any:
    """The inverse. ``get`` gives the tensor of a name. ValueError for what ``encode`` never makes."""
    if isinstance(tree, list):
        return [decode(item, get) for item in tree]
    if not isinstance(tree, dict):
        return tree
    marks = [key for key in tree if key.startswith("$")]
    if not marks:
        return {key: decode(item, get) for key, item in tree.items()}
    if len(tree) != 1 or marks[0] not in _DECODERS:
        raise ValueError(f"{marks[0]!r} is not known here")
    return _DECODERS[marks[0]](tree[marks[0]], get)


def _pairs(rows: Any, get: Callable[[str], torch.Tensor]) -> dict[Any, Any]:
    return {decode(key, get): decode(item, get) for key, item in rows}


_DECODERS: dict[str, Callable[[Any, Callable[[str], torch.Tensor]], Any]] = {
    "$tuple": lambda items, get: tuple(decode(item, get) for item in items),
    "$dict": _pairs,
    "$counter": lambda rows, get: collections.Counter(_pairs(rows, get)),
    "$float": lambda text, _: float(text),
    "$bytes": lambda text, _: bytes.fromhex(text),
    "$tensor": lambda name, get: get(name),
}


def tensors_in(tree: Any) -> list[str]:
    """The names of the tensors that a tree refers to."""
    if isinstance(tree, list):
        return [name for item in tree for name in tensors_in(item)]
    if not isinstance(tree, dict):
        return []
    if set(tree) == {"$tensor"}:
        return [tree["$tensor"]]
    return [name for item in tree.values() for name in tensors_in(item)]
