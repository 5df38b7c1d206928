"""What a model holds, by the names of its ``state_dict``, without gathering anything."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from unwall.runtime.engine import Engine
from unwall.runtime.hooks import engine_of


@dataclass(frozen=True)
class Held:
    """A parameter or a persistent buffer."""

    name: str
    owner: nn.Module
    attribute: str
    tensor: torch.Tensor
    is_buffer: bool
    dtype: torch.dtype
    """The dtype it was given in, which is that of ``state_dict``."""

    @property
    def shape(self) -> torch.Size:
        return self.tensor.shape


def plain(model: nn.Module) -> nn.Module:
    """The model itself, where ``torch.compile`` has put another module around it."""
    inner = getattr(model, "_orig_mod", model)
    if not isinstance(inner, nn.Module):
        raise TypeError(f"expected a model (a torch.nn.Module), got {type(inner).__name__}")
    return inner


def owner_of(model: nn.Module) -> Engine | None:
    """The engine of a sharded model, compiled before or after."""
    return engine_of(model) or engine_of(plain(model))


def inventory(model: nn.Module) -> dict[str, Held]:
    """Every name. A tensor that is tied appears under each of its names."""
    return {held.name: held for held in _held(model)}


def _held(model: nn.Module) -> Iterator[Held]:
    for prefix, module in model.named_modules(remove_duplicate=False):
        start = f"{prefix}.".replace("_orig_mod.", "") if prefix else ""  # compiled or not, the names are the same
        for name, param in module._parameters.items():
            if param is not None:
                yield Held(start + name, module, name, param, False, given_dtype(param))
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                yield Held(start + name, module, name, buffer, True, buffer.dtype)


def given_dtype(param: nn.Parameter) -> torch.dtype:
    """A parameter's dtype before ``shard``."""
    engine = engine_of(param)
    if engine is None or id(param) not in engine.places:
        return param.dtype
    place = engine.places[id(param)][0]
    return engine.groups[place.group].dtypes[place.slot]


def aliases(held: dict[str, Held]) -> dict[int, list[str]]:
    """The names of each tensor, by its id, in the order of the modules."""
    found: dict[int, list[str]] = {}
    for name, entry in held.items():
        found.setdefault(id(entry.tensor), []).append(name)
    return found
