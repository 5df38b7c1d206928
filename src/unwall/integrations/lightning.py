"""``Strategy`` of Lightning for sharded models."""

import contextlib
import importlib
import os
import sys
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from unwall.api import init, shard
from unwall.checkpoint.public import load, save
from unwall.integrations.optimizers import call_inside, innermost, rebuild, repoint
from unwall.integrations.sharding import FOLDER, check_precision, engine_inside, plan_for
from unwall.optim.sharded import ShardedOptimizer
from unwall.plans import Plan


def _library() -> Any:
    """Lightning under the name that the program uses: ``lightning.pytorch`` or ``pytorch_lightning``."""
    names = ["lightning.pytorch", "pytorch_lightning"]
    if names[1] in sys.modules and names[0] not in sys.modules:
        names.reverse()
    with contextlib.suppress(ModuleNotFoundError):
        return importlib.import_module(names[0])
    return importlib.import_module(names[1])


pl = _library()
_PRECISIONS = {"32-true": "no", "bf16-mixed": "bf16", "bf16-true": "bf16"}
_META = "meta.ckpt"
"""Within a sharded checkpoint: all that is not a tensor of the model or of its optimizer."""


class ShardedPrecision(pl.plugins.precision.Precision):  # type: ignore[misc, name-defined]
    """Computes in the plan's dtype, and clips the norm over all ranks."""

    def __init__(self, precision: str = "32-true") -> None:
        if precision not in _PRECISIONS:
            raise ValueError(f"precision={precision!r}: unwall's strategy computes in {', '.join(_PRECISIONS)}")
        self.precision = precision

    def convert_module(self, module: nn.Module) -> nn.Module:
        return module.to(torch.bfloat16) if self.precision == "bf16-true" and engine_inside(module) is None else module

    @contextlib.contextmanager
    def forward_context(self) -> Generator[None, None, None]:
        """Sharded modules compute in their dtype; what a step computes beside them (a loss) is as in plain mixed precision."""
        kind = "cuda" if torch.cuda.is_available() else "cpu"
        with torch.autocast(kind, dtype=torch.bfloat16, enabled=self.precision == "bf16-mixed"):
            yield

    def clip_grad_by_norm(self, optimizer: Any, clip_val: float) -> None:
        innermost(optimizer).clip_grad_norm_(clip_val)


class Strategy(pl.strategies.DDPStrategy):  # type: ignore[misc, name-defined]
    """Shards the LightningModule over all ranks, as ``plan`` says::

        trainer = lightning.Trainer(strategy=Strategy(unwall.Plan(params="host")), precision="bf16-mixed", devices=8)

    The trainer's ``precision`` is the compute dtype, and ``accumulate_grad_batches`` how many backwards add up.
    ``configure_optimizers`` may return any element-wise optimizer of torch, or one of unwall's; what ``configure_model`` builds
    never exists whole. The module stays sharded after ``fit``.

    ``state_dict_type``: what a checkpoint is. ``"sharded"``: a directory that each rank writes its part of, and that loads on
    any number of ranks; ``"full"``: one file as the plain strategies write it, put together on rank 0. Both resume from both.
    """

    strategy_name = "unwall"
    model: nn.Module
    optimizers: list[Any]

    def __init__(
        self, plan: Plan | None = None, state_dict_type: Literal["sharded", "full"] = "sharded", **options: Any
    ) -> None:
        if state_dict_type not in ("sharded", "full"):
            raise ValueError(f"state_dict_type is 'sharded' or 'full', got {state_dict_type!r}")
        self.plan, self.state_dict_type = plan, state_dict_type
        self._loading: Path | None = None
        super().__init__(**options)

    # -- setting up ---------------------------------------------------------------------------------------------------

    @property
    def precision_plugin(self) -> ShardedPrecision:
        return self._sharded_precision

    @precision_plugin.setter
    def precision_plugin(self, given: Any) -> None:
        """Whatever the trainer made of its ``precision``: the same, for sharded models."""
        name = "32-true" if given is None else str(getattr(given, "precision", type(given).__name__))
        self._sharded_precision = given if isinstance(given, ShardedPrecision) else ShardedPrecision(name)

    def setup(self, trainer: Any) -> None:
        self.accelerator.setup(trainer)
        if self.root_device.type == "cpu" and torch.cuda.is_available():
            raise ValueError("accelerator='cpu' beside a GPU: hide the GPU (CUDA_VISIBLE_DEVICES='') to train on the CPU")
        self.model = self.precision_plugin.convert_module(self.model)
        self._shard(trainer.accumulate_grad_batches)
        if trainer.state.fn == "fit":
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()
        for wrapper in self._lightning_optimizers:  # what self.optimizers() gives in manual optimisation
            call_inside(wrapper, pl.core.optimizer.LightningOptimizer)

    def _plan(self, passes: int) -> Plan:
        return plan_for(self.plan, _PRECISIONS[self.precision_plugin.precision], passes, "the trainer's precision")

    def _shard(self, passes: int) -> None:
        found = engine_inside(self.model)
        if found is None:
            shard(self.model, self._plan(passes))
        elif self.precision_plugin.precision != "bf16-true":
            check_precision(self.model, found, _PRECISIONS[self.precision_plugin.precision], "the trainer's precision")

    def setup_optimizers(self, trainer: Any) -> None:
        """Those of ``configure_optimizers``; plain ones become ``unwall.AdamW`` or ``unwall.wrap`` of them."""
        super().setup_optimizers(trainer)
        made = [o if isinstance(o, ShardedOptimizer) else rebuild(o) for o in self.optimizers]
        for given, ours in zip(self.optimizers, made, strict=True):
            for config in self.lr_scheduler_configs:
                repoint(config.scheduler, given, ours)
        self.optimizers = made

    @contextlib.contextmanager
    def model_sharded_context(self) -> Generator[None, None, None]:
        with init(self._plan(1)):
            yield

    def model_to_device(self) -> None:
        """``shard`` has done it."""

    def teardown(self) -> None:
        """The module stays as it is: sharded, on its tiers."""
        self.precision_plugin.teardown()
        self.accelerator.teardown()
        self.checkpoint_io.teardown()

    # -- checkpoints --------------------------------------------------------------------------------------------------

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        return True

    def lightning_module_state_dict(self) -> dict[str, Any]:
        whole: dict[str, Any] = self.lightning_module.state_dict() if self.state_dict_type == "full" else {}
        return whole

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        return innermost(optimizer).state_dict() if self.state_dict_type == "full" else {}

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        if self.state_dict_type == "full":
            super().save_checkpoint(checkpoint, filepath, storage_options)
            return
        folder = Path(self.broadcast(os.fspath(filepath)))
        if folder.is_file():
            raise IsADirectoryError(f"{folder} is a file: a sharded checkpoint is a directory, remove the file first")
        save(folder / FOLDER, self.lightning_module, self._one("optimizer_states" in checkpoint), keep=1)
        if self.is_global_zero:
            torch.save(checkpoint, folder / f"{_META}.partial")
            (folder / f"{_META}.partial").rename(folder / _META)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        folder = Path(checkpoint_path)
        self._loading = folder if folder.is_dir() else None
        if self._loading is None:
            plain: dict[str, Any] = super().load_checkpoint(checkpoint_path, weights_only)
            return plain
        if not (folder / _META).is_file():
            raise FileNotFoundError(f"{folder} is not a checkpoint of unwall's strategy: there is no {_META} in it")
        found: dict[str, Any] = self.checkpoint_io.load_checkpoint(folder / _META, weights_only=weights_only)
        return found

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """A sharded checkpoint is loaded with the states of the optimizer, which are not loaded once more later."""
        if self._loading is None:
            super().load_model_state_dict(checkpoint, strict)
            return
        load(
            self._loading / FOLDER, self.lightning_module, self._one(bool(self.optimizers) and "optimizer_states" in checkpoint)
        )

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        if self._loading is None:
            for optimizer, states in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
                innermost(optimizer).load_state_dict(states)

    def _one(self, wanted: bool) -> ShardedOptimizer | None:
        found = engine_inside(self.lightning_module)
        mine = [o for o in map(innermost, self.optimizers) if found in o.engines()]  # not those of the module fitted before
        if not wanted or not mine:
            return None
        if len(mine) > 1:
            raise ValueError(f"{len(mine)} optimizers: a sharded checkpoint has one; use state_dict_type='full'")
        return mine[0]
