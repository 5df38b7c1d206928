"""Whether an optimizer can be given some parameters."""

from collections.abc import Iterable
from typing import Any

import torch

from unwall.runtime.hooks import engine_of
from unwall.runtime.newcomers import take_in_with

GONE = (
    "the model whose parameters this optimizer updates is gone, and its values with it: keep the model for as long as it is "
    "trained"
)


def checked(param_group: dict[str, Any]) -> dict[str, Any]:
    """A param group, its parameters as a list. Raises where they are not those of sharded models."""
    if not isinstance(param_group, dict) or not isinstance(params := param_group.get("params"), Iterable):
        raise TypeError(f"a param group is a dict with the parameters under 'params', got {param_group!r:.100}")
    if not isinstance(params, torch.Tensor):
        param_group = {**param_group, "params": list(params)}
    listed = param_group["params"]
    for param in [listed] if isinstance(listed, torch.Tensor) else listed:
        given = param[1] if isinstance(param, tuple) and len(param) == 2 else param
        if not isinstance(given, torch.Tensor):
            raise TypeError(f"an optimizer takes the parameters of a sharded model, got {type(given).__name__} among them")
        tensor: Any = given
        engine = engine_of(tensor)
        if engine is None or engine.changed:
            take_in_with(tensor)  # it may have come after shard
        if engine_of(tensor) is None:
            raise ValueError(
                f"a parameter of shape {tuple(tensor.shape)} does not belong to a sharded model: call unwall.shard(model) "
                "first, then build the optimizer from model.parameters(). What Plan(ignore=...) leaves alone, or what lies "
                "in a module around the sharded one, needs an optimizer of its own; or shard the module around it"
            )
    return param_group
