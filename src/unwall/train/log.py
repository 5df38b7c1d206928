"""``log.jsonl``: one line per step. And TensorBoard, where it is asked for."""

import importlib.util
import json
import math
import os
from pathlib import Path
from typing import Any

from unwall.train.errors import missing


class Log:
    """Appends lines. A run that resumes at a step forgets what was logged behind it."""

    def __init__(self, path: Path, step: int, tensorboard: Path | None) -> None:
        self._path = path
        if path.exists():
            _cut(path, step)
        self._file = path.open("a", encoding="utf-8")
        self._writer = None if tensorboard is None else _writer(tensorboard, step)

    def add(self, line: dict[str, Any]) -> None:
        """Numbers that are not finite become null: JSON has none."""
        shown = {name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in line.items()}
        self._file.write(json.dumps(shown) + "\n")
        self._file.flush()
        if self._writer is not None and line["kind"] != "start":
            for name in ("loss", "lr", "grad_norm", "tokens_per_second", "bound_fraction", "perplexity"):
                if line.get(name) is not None:
                    self._writer.add_scalar(f"{'train' if line['kind'] == 'step' else 'eval'}/{name}", line[name], line["step"])

    def close(self) -> None:
        self._file.close()
        if self._writer is not None:
            self._writer.close()


def _cut(path: Path, step: int) -> None:
    """Only what belongs to steps up to this one stays; half a line of a killed process goes."""
    partial = path.with_suffix(".partial")
    with path.open(encoding="utf-8", errors="replace") as old, partial.open("w", encoding="utf-8") as new:
        for line in old:
            try:
                kept = line.endswith("\n") and json.loads(line)["step"] <= step
            except (ValueError, KeyError, TypeError):
                kept = False
            if kept:
                new.write(line)
        new.flush()
        os.fsync(new.fileno())
    partial.replace(path)


def check_tensorboard() -> None:
    """TrainError where it is not installed: said before anything is loaded."""
    if importlib.util.find_spec("tensorboard") is None:
        raise missing("tensorboard", "--tensorboard")


def _writer(folder: Path, step: int) -> Any:
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(str(folder), purge_step=step + 1)
