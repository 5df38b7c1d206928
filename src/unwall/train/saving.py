"""Checkpoints of a run, and taking it up again.

A full run's are those of ``unwall.save``, written beside training. With LoRA the base never changes: a checkpoint is one small
file with the adapters, their optimizer states and the position in the data.
"""

import os
from pathlib import Path
from typing import Any

import torch

from unwall.checkpoint.directory import complete, sync_directory
from unwall.checkpoint.errors import CheckpointError
from unwall.checkpoint.generators import read_generators, write_generators
from unwall.checkpoint.public import load, save
from unwall.checkpoint.save import PendingSave
from unwall.shards.collectives import Ranks
from unwall.train.errors import TrainError
from unwall.train.lora import adapter_values, write_adapter_values
from unwall.train.model import Trained
from unwall.train.world import together

_NAME = "adapters-{:09d}.pt"


def has_checkpoint(folder: Path) -> bool:
    """Whether there is anything to go on from."""
    return bool(complete(folder)) or bool(_adapter_files(folder))


class FullSaver:
    """``unwall.save`` and ``unwall.load``."""

    def __init__(self, folder: Path, trained: Trained, keep: int) -> None:
        self._folder, self._trained, self._keep = folder, trained, keep
        self._pending: PendingSave | None = None

    def save(self, extra: dict[str, Any], *, block: bool) -> None:
        self.wait()
        made = save(self._folder, self._trained.base, self._trained.optimizer, extra, self._keep, block=block)
        self._pending = None if isinstance(made, Path) else made

    def load(self) -> dict[str, Any]:
        try:
            found: dict[str, Any] = load(self._folder, self._trained.base, self._trained.optimizer)
        except CheckpointError as error:
            there = complete(self._folder)
            if len(there) < 2:
                raise
            raise CheckpointError(f"{error}; remove {there[-1]} to go on from the checkpoint before it") from None
        return found

    def wait(self) -> None:
        """For what is written beside training. OSError where that failed."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.wait()


class AdapterSaver:
    """The same for LoRA."""

    def __init__(self, folder: Path, trained: Trained, keep: int, ranks: Ranks) -> None:
        self._folder, self._trained, self._keep, self._ranks = folder, trained, keep, ranks

    def save(self, extra: dict[str, Any], *, block: bool) -> None:  # noqa: ARG002 - it is small
        values = adapter_values(self._trained.model)
        states = self._trained.optimizer.state_dict()
        generators = self._ranks.every(read_generators(self._trained.engine.device.device))
        error: OSError | None = None
        if self._ranks.rank == 0:
            try:
                content = {"values": values, "optimizer": states, "generators": generators, "extra": extra}
                self._write(self._folder / _NAME.format(extra["step"]), content)
            except OSError as found:
                error = found
        if any(self._ranks.every(error is not None)):
            raise error or OSError("rank 0 could not write the checkpoint")

    def load(self) -> dict[str, Any]:
        found = self._ranks.broadcast_object(together(self._ranks, self._read))
        write_adapter_values(self._trained.model, found["values"])
        self._trained.optimizer.load_state_dict(found["optimizer"])
        if len(found["generators"]) == self._ranks.size:
            write_generators(found["generators"][self._ranks.rank], self._trained.engine.device.device)
        extra: dict[str, Any] = found["extra"]
        return extra

    def wait(self) -> None:
        """Nothing is written beside training."""

    def _read(self) -> Any:
        """The newest, on rank 0."""
        if self._ranks.rank:
            return None
        path = _adapter_files(self._folder)[-1]
        try:
            return torch.load(path, map_location="cpu", weights_only=True)
        except Exception as error:
            kind = type(error).__name__
            raise TrainError(f"{path} cannot be read ({kind}): remove it to go on from the one before") from error

    def _write(self, path: Path, content: Any) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".partial")
        with partial.open("wb") as file:
            torch.save(content, file)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
        sync_directory(self._folder)
        for old in _adapter_files(self._folder)[: -self._keep]:
            old.unlink()


def _adapter_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("adapters-*.pt"))
