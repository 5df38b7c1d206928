"""What ``load_state_dict`` is given, against what the modules want, before anything is written."""

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn

COLUMNS = 1024


class Given(NamedTuple):
    """A tensor that a rank was given, in short."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    digest: int


@dataclass
class Wanted:
    """What the modules below one of them take from a state dict."""

    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Of parameters and persistent buffers, by key."""
    others: set[str] = field(default_factory=set)
    """Keys of extra state."""
    optional: set[str] = field(default_factory=set)
    """Keys that may be missing."""
    own: set[str] = field(default_factory=set)
    """Keys of what each rank has for itself: buffers, and parameters that are not sharded. Their values may differ."""
    free: list[str] = field(default_factory=list)
    """Prefixes below which modules read in ways of their own: nobody can tell which keys they want."""

    def knows(self, key: str) -> bool:
        return not any(key.startswith(prefix) for prefix in self.free)


class Outline(NamedTuple):
    """What a rank was given."""

    tensors: dict[str, Given]
    rest: tuple[str, ...]
    """Keys of what is no tensor."""


def wanted_by(module: nn.Module, prefix: str, sharded: Container[int]) -> Wanted:
    """What a module and those below it take from a state dict, as torch does it. ``sharded``: the ids of parameters."""
    found = Wanted()
    for name, owner in module.named_modules(remove_duplicate=False):
        path = f"{prefix}{name}." if name else prefix
        if _reads_its_own_way(owner):
            found.free.append(path)
        for own, param in owner._parameters.items():
            if param is not None:
                found.shapes[path + own] = tuple(param.shape)
                if id(param) not in sharded:
                    found.own.add(path + own)
        for own, buffer in owner._buffers.items():
            if buffer is not None and own not in owner._non_persistent_buffers_set:
                found.shapes[path + own] = tuple(buffer.shape)
                found.own.add(path + own)
        if isinstance(owner, nn.modules.batchnorm._NormBase):
            found.optional.add(path + "num_batches_tracked")  # old files have none, and torch does not mind
        if type(owner).get_extra_state is not nn.Module.get_extra_state:
            found.others.add(path + "_extra_state")
    return found


def _reads_its_own_way(module: nn.Module) -> bool:
    read = type(module)._load_from_state_dict
    known = (nn.Module._load_from_state_dict, nn.modules.batchnorm._NormBase._load_from_state_dict)
    hooks = (getattr(hook, "hook", hook) for hook in module._load_state_dict_pre_hooks.values())
    return read not in known or any(
        not type(getattr(hook, "__self__", None)).__module__.startswith("unwall.") for hook in hooks
    )


def outline_of(state_dict: Mapping[str, Any], prefix: str, wanted: Wanted, digests: bool) -> Outline:
    """What of a state dict concerns the modules. ``digests``: with checksums, for other ranks to compare."""
    tensors, rest = {}, []
    for key, value in state_dict.items():
        if not key.startswith(prefix):
            continue
        if isinstance(value, torch.Tensor) and key not in wanted.others:
            compared = digests and key not in wanted.own and not value.is_meta
            tensors[key] = Given(tuple(value.shape), value.dtype, digest_of(value) if compared else 0)
        else:
            rest.append(key)
    return Outline(tensors, tuple(rest))


def unreadable(state_dict: Mapping[str, Any], prefix: str, wanted: Wanted) -> list[str]:
    """What cannot be copied: torch would say so when it has changed some parameters."""
    if torch.__future__.get_swap_module_params_on_conversion():
        return ["torch.__future__.set_swap_module_params_on_conversion(True) replaces parameters: load without it"]
    given = {key: value for key, value in state_dict.items() if key.startswith(prefix) and key in wanted.shapes}
    return [f"{key}: a tensor on the meta device has no values" for key, value in given.items() if _is_meta(value)]


def _is_meta(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_meta


def as_bytes(value: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor, in the order of its elements."""
    flat = value.detach().contiguous().reshape(-1)
    if flat.numel() == 1:  # contiguous with any stride, but torch wants 1
        flat = flat.clone(memory_format=torch.contiguous_format)
    return flat.view(torch.uint8)


def digest_of(value: torch.Tensor) -> int:
    """A checksum of a tensor's bytes that depends on their order."""
    flat = as_bytes(value)
    if flat.storage_offset() % 8:
        flat = flat.clone()  # a view as words begins at a multiple of one
    words = flat[: flat.numel() // 8 * 8].view(torch.int64)
    rest = flat[words.numel() * 8 :].to(torch.int64)
    table = words[: words.numel() // COLUMNS * COLUMNS].view(-1, COLUMNS)
    sums = [table.sum(0), table.sum(1), words[table.numel() :], rest]
    total = 0
    for row in sums:
        total = total * 1000003 + int((row * torch.arange(1, row.numel() + 1, device=row.device)).sum())
    return total & (1 << 62) - 1


def compare(every: Sequence[Outline], wanted: Wanted, strict: bool | None) -> list[str]:
    """What is wrong with what the ranks were given, rank 0 first. ``strict``: None where nobody knows: torch will tell."""
    first = every[0]
    problems = _shape_problems(first, wanted)
    if strict:
        problems += _key_problems(first, wanted)
    for rank, other in enumerate(every[1:], 1):
        for key, given in other.tensors.items():
            if key not in first.tensors:
                problems.append(f"{key}: rank {rank} was given it, rank 0 was not. Load the same values on every rank")
            elif given != first.tensors[key]:
                problems.append(
                    f"{key}: rank {rank} was given other values than rank 0. Load the same values on every rank, or on rank 0 "
                    "and an empty state dict on the others"
                )
        for key in first.tensors.keys() - other.tensors.keys():
            if key not in wanted.shapes:
                problems.append(f"{key}: rank {rank} was not given it, and a module reads it in a way of its own")
    return problems


def _shape_problems(given: Outline, wanted: Wanted) -> list[str]:
    problems = []
    for key, shape in wanted.shapes.items():
        if not wanted.knows(key):
            continue
        if key in given.rest:
            problems.append(f"{key}: a tensor is expected")
        elif key in given.tensors and given.tensors[key].shape not in (shape, (1,) if shape == () else shape):
            got = given.tensors[key].shape
            problems.append(
                f"size mismatch for {key}: copying a param with shape {list(got)} from checkpoint, the shape in current model "
                f"is {list(shape)}."
            )
    return problems


def _key_problems(given: Outline, wanted: Wanted) -> list[str]:
    keys = {*given.tensors, *given.rest}
    needed = (wanted.shapes.keys() | wanted.others) - wanted.optional
    missing = [key for key in sorted(needed - keys) if wanted.knows(key)]
    unexpected = [key for key in sorted(keys - wanted.shapes.keys() - wanted.others) if wanted.knows(key)]
    problems = []
    if unexpected:
        problems.append(f"Unexpected key(s) in state_dict: {', '.join(map(repr, unexpected))}. ")
    if missing:
        problems.append(f"Missing key(s) in state_dict: {', '.join(map(repr, missing))}. ")
    return problems
