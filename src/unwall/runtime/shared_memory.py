"""Tensors of a model that share memory with a parameter: after ``shard`` they would not follow it any more."""

from collections.abc import Iterable

import torch
from torch import nn

Key = tuple[torch.device, int]


def refuse_shared(params: Iterable[tuple[str, nn.Parameter]], buffers: Iterable[tuple[str, torch.Tensor]]) -> None:
    """RuntimeError where a parameter that is trained shares its memory with a buffer, or with another parameter (by
    ``a.data = b.data``): a step changes both in plain PyTorch. Parts of one storage that do not begin at the same element are
    no matter: recurrent layers lay their parameters out so."""
    trained: dict[Key, str] = {}
    for name, param in params:
        key = _begin_of(param) if param.requires_grad else None
        if key is None:
            continue
        if key in trained:
            raise RuntimeError(
                f"parameters {trained[key]} and {name} are two that share their memory, which no step could keep up in shards: "
                "make them one parameter (module.weight = other.weight), or give each its own values (.data.clone())"
            )
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
