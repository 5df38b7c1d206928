"""``unwall.save`` and ``unwall.load``."""

import os
from pathlib import Path
from typing import Any, Literal, overload

from torch import nn

from unwall.checkpoint.load import load_engine
from unwall.checkpoint.save import PendingSave, save_engine
from unwall.checkpoint.trained import Optimizers
from unwall.runtime.engine import Engine
from unwall.runtime.hooks import engine_of

StrPath = str | os.PathLike[str]


@overload
def save(
    path: StrPath,
    model: nn.Module,
    optimizer: Optimizers = None,
    extra: Any = None,
    keep: int | None = None,
    block: Literal[True] = True,
) -> Path: ...


@overload
def save(
    path: StrPath,
    model: nn.Module,
    optimizer: Optimizers = None,
    extra: Any = None,
    keep: int | None = None,
    *,
    block: bool,
) -> Path | PendingSave: ...


def save(
    path: StrPath,
    model: nn.Module,
    optimizer: Optimizers = None,
    extra: Any = None,
    keep: int | None = None,
    block: bool = True,
) -> Path | PendingSave:
    """Writes the next numbered checkpoint of the directory ``path``, and gives its path. All ranks call it together.

    In it are the parameters in full precision, the optimizer's states, step counts and options, buffers, random number
    generators and ``extra``: anything of numbers, strings, tensors, lists and dicts (``scheduler.state_dict()``, the position
    in the data). Gradients are not. It exists whole or not at all: what a killed save left behind is removed by the next one.
    ``optimizer``: one, a list, or a dict of several by name; ``load`` wants them alike.
    ``keep``: only so many of the newest complete ones stay.

    ``block=False`` returns as soon as training may go on, with a handle: its ``wait()`` gives the path. An update waits where
    the save has not read the group yet. A failure is raised by ``wait``, or by the next save or load.
    """
    return save_engine(path, _engine(model), model, optimizer, extra, keep, block)


def load(path: StrPath, model: nn.Module, optimizer: Optimizers = None) -> Any:
    """Loads a checkpoint, or the newest complete one of a directory of checkpoints, and gives back its ``extra``.

    The number of ranks, the stage, the tiers and the compute dtype may be others than at the save. With the same ones training
    goes on with the same bits; random number generators come back where the number of ranks is the same. Everything is verified
    before anything changes: CheckpointError for a damaged checkpoint, or one of another model. FileNotFoundError where there is
    none. All ranks call it together.
    """
    return load_engine(path, _engine(model), model, optimizer)


def _engine(model: nn.Module) -> Engine:
    found = engine_of(model) if isinstance(model, nn.Module) else None
    if found is None:
        raise RuntimeError(f"{type(model).__name__} is not sharded: call unwall.shard(model) first")
    return found
