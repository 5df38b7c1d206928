"""What a PEFT model trains, in one small file: the frozen base stays out of checkpoints."""

import os
from pathlib import Path
from typing import Any

import torch
from torch import nn

from unwall.api import engine, full_params
from unwall.checkpoint.agree import agree
from unwall.checkpoint.errors import CheckpointError
from unwall.optim.sharded import ShardedOptimizer

FILE = "unwall_adapters.pt"


def is_peft(model: nn.Module) -> bool:
    """Whether PEFT is around the model, or has put adapters into it."""
    return bool(getattr(model, "peft_config", None))


def trained_values(model: nn.Module) -> dict[str, torch.Tensor]:
    """Whole values of the parameters that are trained, in full precision, on rank 0; no tensors elsewhere. A collective."""
    first, found = engine(model).ranks.rank == 0, {}
    for name, param in model.named_parameters():
        if param.requires_grad:
            with full_params(param):
                if first:
                    found[name] = param.detach().to("cpu", copy=True)
    return found


def save_adapters(folder: str | os.PathLike[str], model: nn.Module, optimizer: ShardedOptimizer) -> None:
    """Writes what is trained, and the optimizer's states of it. All ranks call it together."""
    values, states, error = trained_values(model), optimizer.state_dict(), None
    ranks = engine(model).ranks
    if ranks.rank == 0:
        try:
            target = Path(folder, FILE)
            target.parent.mkdir(parents=True, exist_ok=True)
            partial = target.with_suffix(".partial")
            torch.save({"parameters": values, "optimizer": states}, partial)
            partial.rename(target)
        except Exception as found:
            error = found
    agree(ranks, error, f"saving adapters to {os.fspath(folder)}")


def load_adapters(folder: str | os.PathLike[str], model: nn.Module, optimizer: ShardedOptimizer | None) -> None:
    """The inverse. CheckpointError, before anything changes, where the file is of other adapters."""
    saved: dict[str, Any] = torch.load(Path(folder, FILE), map_location="cpu", weights_only=True)
    values = saved["parameters"]
    trained = {name: param for name, param in model.named_parameters() if param.requires_grad}
    other = sorted(set(values) ^ set(trained)) or [n for n, value in values.items() if value.shape != trained[n].shape]
    if other:
        raise CheckpointError(f"{folder} is of other adapters ({other[0]}, for one): build the model with the same peft_config")
    for name, param in trained.items():
        with full_params(param, write=True), torch.no_grad():
            param.copy_(values[name])
    if optimizer is not None:
        optimizer.load_state_dict(saved["optimizer"])
