"""Tensors of a model that share memory with a parameter: after ``shard`` they would not follow it any more."""

from collections.abc import Iterable

import torch
from torch import nn

Key = tuple[torch.device, int]


def refuse_shared(params: Iterable[tuple[str, nn.Parameter]], buffers: Iterable[tuple[str, torch.Tensor]]) -> None:
    """RuntimeError where a parameter that is trained shares its memory with a buffer, or with another parameter, trained or
    frozen (by ``a.data = b.data``): a step changes both in plain PyTorch. Parts of one storage that do not begin at the same
    element are no matter: recurrent layers lay their parameters out so."""
    trained: dict[Key, str] = {}
    for name, param in sorted(params, key=lambda entry: not entry[1].requires_grad):
        key = _begin_of(param)
        if key is not None and key in trained:
            frozen = "" if param.requires_grad else f" ({name} is frozen, and would not follow)"
            raise RuntimeError(
                f"parameters {trained[key]} and {name} are two that share their memory, which no step could keep up in shards"
                f"{frozen}: make them one parameter (module.weight = other.weight), or give each its own values (.data.clone())"
            )
        if key is not None and param.requires_grad:
            trained[key] = name
    for name, buffer in buffers:
        key = _begin_of(buffer)
        if key in trained and key is not None:
            raise RuntimeError(
                f"buffer {name} shares its memory with parameter {trained[key]} and would not follow it after unwall.shard: "
                "register a copy (.clone()), or read the parameter instead"
            )


def _begin_of(tensor: torch.Tensor) -> Key | None:
    """Where its memory begins. None where it has none of its own: on the meta device, paged out, or one element for all."""
    if type(tensor) not in (torch.Tensor, nn.Parameter, nn.Buffer) or tensor.is_meta or tensor.layout is not torch.strided:
        return None
    if tensor.numel() == 0 or tensor.untyped_storage().nbytes() < tensor.numel() * tensor.itemsize:
        return None
    return tensor.device, tensor.data_ptr()
