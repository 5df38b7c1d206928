"""What ``unwall train`` was asked for, checked before anything is loaded."""

import dataclasses
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unwall.tiers.sizes import parse_bytes
from unwall.train.errors import TrainError

SCHEDULES = ("cosine", "linear", "constant")
IDENTITY = ("model", "data", "tokenizer", "seq", "batch", "seed", "lora", "lora_rank", "lora_alpha", "lora_targets")
"""A run that differs in one of these is another run: it needs another ``--out``."""
FREE = ("nproc", "verbose", "tensorboard", "plan", "device_bytes", "host_bytes", "disk", "keep", "save_every", "out")
"""What may change from one start to the next without being worth a word."""


PATHS = ("model", "data", "tokenizer", "eval_data")


@dataclass(frozen=True, kw_only=True)
class Options:
    """All of them, as the command line gives them."""

    model: str
    """A directory that ``save_pretrained`` wrote, or a config file: then the weights are random."""
    data: tuple[str, ...]
    """Files, directories of files, ``datasets`` directories, or patterns."""
    out: str
    tokenizer: str | None = None
    """A directory. None: the model's."""
    seq: int = 1024
    """Tokens per sequence."""
    batch: int = 8
    """Sequences per step, over all ranks."""
    steps: int | None = None
    epochs: float | None = None
    """Passes over the data. One, where neither is given."""
    lr: float | None = None
    """None: 2e-5, or 2e-4 with LoRA."""
    warmup: float = 0.03
    """Steps, or below 1 a share of them."""
    schedule: str = "cosine"
    weight_decay: float = 0.0
    """Of matrices; norms and biases are not decayed."""
    clip: float = 1.0
    """The norm that gradients are clipped to. 0: they are not."""
    accumulate: int | None = None
    """Passes per step. None: what the planner chooses."""
    eval_data: tuple[str, ...] = ()
    eval_every: int | None = None
    """Steps. None: at the end only."""
    save_every: int = 500
    """Steps. 0: no checkpoints, only the result."""
    keep: int = 2
    seed: int = 0
    plan: str = "auto"
    """``auto``, or a .toml file with fields of ``Plan``."""
    device_bytes: str | None = None
    host_bytes: str | None = None
    disk: str | None = None
    lora: bool = False
    lora_rank: int = 16
    lora_alpha: float | None = None
    """None: twice the rank."""
    lora_dropout: float = 0.0
    lora_targets: str = "all-linear"
    """Names of modules, separated by commas."""
    states: str = "exact"
    tensorboard: bool = False
    nproc: int | None = None
    strict: bool = False
    """A sample that cannot be read ends the run."""
    on_nonfinite: str = "stop"
    verbose: bool = False

    def __post_init__(self) -> None:
        self._check_numbers()
        self._check_choices()
        if not self.data:
            raise TrainError("no data: --data FILE (.txt, .jsonl, .parquet, or a datasets directory)")
        for name in ("model", "out", "data", "eval_data", "tokenizer", "disk", "lora_targets"):
            value = getattr(self, name)
            if any(not str(each).strip() for each in (value if isinstance(value, tuple) else (value,)) if each is not None):
                what = "names of modules" if name == "lora_targets" else "a path"
                raise TrainError(f"--{name.replace('_', '-')} is empty: give {what} (a shell variable that is not set?)")
        for name in ("device_bytes", "host_bytes"):
            value = getattr(self, name)
            if value is not None:
                option = f"--{name.replace('_', '-')}"
                number = parse_bytes(int(value) if value.isdigit() else value, option)
                if number == 0:
                    raise TrainError(f"{option} must be greater than zero, got {value!r}")
        if not self.lora:
            self._check_without_lora()
        if self.eval_every is not None and not self.eval_data:
            raise TrainError("--eval-every without data to evaluate on: add --eval-data FILE")
        self._check_paths()

    def _check_numbers(self) -> None:
        for name in ("seq", "batch", "steps", "accumulate", "eval_every", "keep", "lora_rank", "nproc"):
            value = getattr(self, name)
            if value is not None and value < (2 if name == "seq" else 1):
                raise TrainError(f"--{name.replace('_', '-')} is {2 if name == 'seq' else 1} or more, got {value}")
        if not -(2**63) <= self.seed < 2**63:
            raise TrainError(f"--seed is a number of at most 63 bits, got {self.seed}")
        if self.save_every < 0:
            raise TrainError(f"--save-every is a number of steps, or 0 for no checkpoints, got {self.save_every}")
        for name in ("epochs", "lr"):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value > 0):
                raise TrainError(f"--{name} must be a number above 0, got {value}")
        for name in ("warmup", "weight_decay", "clip", "lora_dropout"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise TrainError(f"--{name.replace('_', '-')} must be 0 or more, got {value}")
        if self.lora_dropout >= 1:
            raise TrainError(f"--lora-dropout is below 1, got {self.lora_dropout}")
        if self.batch % ((self.accumulate or 1) * (self.nproc or 1)):
            raise TrainError(
                f"--batch {self.batch} cannot be divided evenly over --nproc {self.nproc or 1} times --accumulate "
                f"{self.accumulate or 1}: use a multiple of {(self.accumulate or 1) * (self.nproc or 1)}"
            )

    def _check_without_lora(self) -> None:
        """TrainError where adapters are described but not asked for: everything would be trained instead."""
        for item in dataclasses.fields(self):
            if item.name.startswith("lora_") and getattr(self, item.name) != item.default:
                raise TrainError(
                    f"--{item.name.replace('_', '-')} without --lora: add --lora to train adapters, or leave it out"
                )

    def _check_choices(self) -> None:
        if self.schedule not in SCHEDULES:
            raise TrainError(f"--schedule is one of {', '.join(SCHEDULES)}, got {self.schedule!r}")
        if self.on_nonfinite not in ("stop", "skip"):
            raise TrainError(f"--on-nonfinite is stop or skip, got {self.on_nonfinite!r}")
        if self.states not in ("exact", "lean"):
            raise TrainError(f"--states is exact or lean, got {self.states!r}")

    def _check_paths(self) -> None:
        model = Path(self.model)
        if not model.exists():
            raise TrainError(
                f"--model {self.model}: no such directory or file; a model of the Hugging Face hub is fetched first, with "
                f"`hf download NAME --local-dir DIR`"
            )
        if model.is_dir() and not (model / "config.json").is_file():
            raise TrainError(f"--model {self.model}: has no config.json; give a directory that save_pretrained wrote")
        if self.tokenizer is not None and not Path(self.tokenizer).is_dir():
            raise TrainError(f"--tokenizer {self.tokenizer}: no such directory")
        if self.disk is not None and not Path(self.disk).is_dir():
            raise TrainError(f"--disk {self.disk}: no such directory; make it, on a fast drive")
        if self.plan != "auto" and not Path(self.plan).is_file():
            raise TrainError(f"--plan {self.plan}: no such file; write `auto`, or the path of a .toml file with fields of Plan")

    @property
    def rate(self) -> float:
        """The learning rate."""
        return self.lr if self.lr is not None else 2e-4 if self.lora else 2e-5

    @property
    def from_config(self) -> bool:
        """Whether the weights are random."""
        return Path(self.model).is_file()

    @property
    def tokenizer_folder(self) -> Path:
        if self.tokenizer is not None:
            return Path(self.tokenizer)
        return Path(self.model).parent if self.from_config else Path(self.model)

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {name: list(value) if isinstance(value, tuple) else value for name, value in dataclasses.asdict(self).items()}

    def differences(self, before: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
        """What another start was asked for, and this one: where they differ."""
        now = self.to_dict()
        return {
            name: (before[name], value)
            for name, value in now.items()
            if name in before and before[name] != value and not (name in PATHS and _meant(before[name]) == _meant(value))
        }


def _meant(value: Any) -> Any:
    """A path may be written in several ways: ``llama``, ``./llama/``."""
    if isinstance(value, list):
        return [_meant(path) for path in value]
    return os.path.abspath(value) if isinstance(value, str) else value
