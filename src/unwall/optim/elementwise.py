"""Whether an optimizer can run on shards, and which states it keeps.

[Note: element-wise]
An update is element-wise when each element of a parameter changes by its own gradient and state alone. Only then is updating
a shard the same as updating the whole. That is tried, not assumed: one probe tensor is updated whole, another in flat pieces,
and the results must be equal bit by bit. The states that the pieces have in the end are those that the optimizer keeps.
"""

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from unwall.optim.torch_rule import bare, spans
from unwall.shards.states import StateSpec

_CUTS = [5, 20, 23]


def try_out(
    inner: torch.optim.Optimizer, options: Mapping[str, Any], state: Mapping[str, Any], owner: torch.Tensor
) -> dict[str, StateSpec]:
    """The states that an optimizer keeps of a parameter, by their names. ValueError where it is not element-wise.

    ``state``: what it made for the parameter ``owner`` when it was built (Adagrad does: the same number for every element).
    """
    name = type(inner).__name__
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(6, 8, generator=generator)
    grads = [torch.randn(6, 8, generator=generator) for _ in range(3)]
    whole, *pieces = (nn.Parameter(start.clone()), *(nn.Parameter(part.clone()) for part in start.flatten().split(_CUTS)))
    kept: Mapping[str, Any] = {}
    try:
        for params in ([whole], pieces):
            trial = bare(inner)
            trial.param_groups = [{**options, "params": params}]
            if state:
                trial.state.update({param: _initial_state(state, owner, param) for param in params})
            for grad in grads:
                parts = [grad] if len(params) == 1 else grad.flatten().split(_CUTS)
                for param, part in zip(params, parts, strict=True):
                    param.grad = part.clone()
                trial.step()
            kept = trial.state[params[-1]]
    except Exception as error:
        raise ValueError(
            f"{name} cannot be wrapped as an element-wise optimizer: a trial step on flat pieces failed with: {error}"
        ) from error
    if not torch.equal(whole.detach().flatten(), torch.cat([piece.detach() for piece in pieces])):
        raise ValueError(
            f"{name} is not element-wise: updating a parameter in pieces gives another result than updating it whole, so it "
            "cannot run on shards. Use unwall.AdamW or an element-wise optimizer (SGD, Adagrad, RMSprop, Lion, ...)"
        )
    found = {}
    for key, value in kept.items():
        if spans(value, pieces[-1]):
            if key in ("step", "inner"):
                raise ValueError(f"{name} keeps a tensor {key!r} of the parameter's shape: state_dict needs that name itself")
            found[key] = StateSpec(key, value.dtype, _initial(inner, key, state.get(key), owner))
    return found


def _initial(inner: torch.optim.Optimizer, name: str, made: Any, owner: torch.Tensor) -> float:
    """The number that a state begins with, in fp32: ``made`` was rounded to the dtype of a sharded parameter, so ask again."""
    if not spans(made, owner) or made.numel() == 0:
        return 0.0
    value = float(made.reshape(-1)[0])
    try:
        param = nn.Parameter(torch.zeros(1))
        exact = float(type(inner)([param], **inner.defaults).state[param][name].reshape(-1)[0])
    except Exception:  # a constructor of its own kind
        return value
    return exact if rounded_to(made, exact) == value else value


def rounded_to(like: torch.Tensor, value: float) -> float:
    """A number as it is in the dtype of a tensor."""
    return float(torch.tensor(value, dtype=like.dtype))


def _initial_state(state: Mapping[str, Any], owner: torch.Tensor, piece: torch.Tensor) -> dict[str, Any]:
    made = {}
    for name, value in state.items():
        if spans(value, owner) and value.numel():
            dtype = piece.dtype if value.dtype is owner.dtype else value.dtype
            made[name] = value.reshape(-1)[:1].to("cpu", dtype).expand(piece.numel()).reshape(piece.shape).clone()
        else:
            made[name] = copy.deepcopy(value)
    return made
