"""The names of a model's parameters and buffers in a checkpoint."""

from dataclasses import dataclass

import torch
from torch import nn

from unwall.runtime.engine import Engine

_COMPILED = "_orig_mod."
"""What torch.compile puts into names: the same model has the same names, compiled or not."""


@dataclass(frozen=True)
class Names:
    """What a model calls its tensors."""

    params: dict[str, nn.Parameter]
    """By the first name of each."""
    aliases: dict[str, tuple[str, ...]]
    """Further names of tied parameters, by their first."""
    buffers: dict[str, torch.Tensor]
    """Those that ``state_dict`` holds."""
    states: dict[str, nn.Module]
    """Modules with a state beside their tensors (``get_extra_state``)."""

    @property
    def of(self) -> dict[int, str]:
        """The names of parameters, by their ids."""
        return {id(param): name for name, param in self.params.items()}


def names_of(model: nn.Module, engine: Engine) -> Names:
    """ValueError where the model is only a part of the sharded one: what is outside of it would be missing."""
    params: dict[str, nn.Parameter] = {}
    first: dict[int, str] = {}
    aliases: dict[str, tuple[str, ...]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        name = name.replace(_COMPILED, "")
        known = first.setdefault(id(param), name)
        if known == name:
            params[name] = param
        else:
            aliases[known] = (*aliases.get(known, ()), name)
    missing = [
        group.layout.slots[at].name for group in engine.groups for at, p in enumerate(group.params) if id(p) not in first
    ]
    if missing:
        raise ValueError(f"{type(model).__name__} is a part of a sharded model ({missing[0]} is outside of it): give all of it")
    buffers: dict[str, torch.Tensor] = {}
    states: dict[str, nn.Module] = {}
    for path, module in model.named_modules():
        prefix = f"{path}." if path else ""
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                buffers[(prefix + name).replace(_COMPILED, "")] = buffer
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            states[path.replace(_COMPILED, "")] = module
    return Names(params, aliases, buffers, states)
