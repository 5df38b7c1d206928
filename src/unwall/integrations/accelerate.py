"""``Accelerator`` of Hugging Face Accelerate for sharded models."""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator as _Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from torch import nn

from unwall.api import engine, shard
from unwall.checkpoint.public import load, save
from unwall.integrations.optimizers import innermost, rebuild, repoint
from unwall.integrations.sharding import DTYPES, FOLDER, check_precision, engine_inside, plan_for
from unwall.optim.sharded import ShardedOptimizer
from unwall.plans import Plan


def prepared(optimizer: ShardedOptimizer, accelerator: _Accelerator) -> AcceleratedOptimizer:
    """Accelerate's wrapper without what it does first otherwise: moving all states to the device."""
    made = AcceleratedOptimizer(optimizer, device_placement=False, scaler=accelerator.scaler)
    made._is_accelerate_prepared = True
    return made


class Accelerator(_Accelerator):  # type: ignore[misc]
    """An ``accelerate.Accelerator`` whose ``prepare`` shards the model, as ``plan`` says, and takes in its optimizer::

        accelerator = Accelerator(plan=unwall.Plan(params="host"), mixed_precision="bf16")
        model, optimizer, loader = accelerator.prepare(model, torch.optim.AdamW(model.parameters()), loader)

    ``mixed_precision`` is the compute dtype ("no": fp32). An optimizer given to ``prepare`` may be any element-wise one of
    torch, built before or after, or one of unwall's. ``clip_grad_norm_`` gives the norm over all ranks, ``save_state``
    writes sharded, and ``get_state_dict`` gives whole tensors on rank 0.
    DeepSpeed, FSDP and other parallelism of Accelerate are refused.
    """

    _models: list[nn.Module]
    _optimizers: list[Any]

    def __init__(self, *args: Any, plan: Plan | None = None, **options: Any) -> None:
        for name in ("deepspeed_plugin", "deepspeed_plugins", "fsdp_plugin", "megatron_lm_plugin", "parallelism_config"):
            if options.get(name) is not None:
                raise ValueError(f"{name}: unwall partitions the model itself, so leave {name} out")
        super().__init__(*args, **options)
        if self.mixed_precision not in DTYPES:
            raise ValueError(f"mixed_precision={self.mixed_precision!r}: unwall computes in no (fp32), fp16 or bf16")
        kind = getattr(self.distributed_type, "value", self.distributed_type)
        if kind in ("DEEPSPEED", "FSDP", "MEGATRON_LM", "XLA"):
            raise ValueError(
                f"the launcher asks for {kind}: unwall partitions the model itself, so configure plain data parallelism"
            )
        if self.device.type == "cpu" and torch.cuda.is_available():
            raise ValueError(
                "cpu=True beside a GPU: unwall uses the GPU; hide it (CUDA_VISIBLE_DEVICES='') to train on the CPU"
            )
        self.plan = plan_for(plan, self.mixed_precision, self.gradient_accumulation_steps, "mixed_precision")

    def prepare(self, *args: Any, device_placement: list[bool] | None = None) -> Any:
        """Shards models first, so that optimizers, whatever their place in the list, find them sharded."""
        for thing in args:
            if isinstance(thing, nn.Module):
                self._shard(thing)
        return super().prepare(*args, device_placement=device_placement)

    def prepare_model(self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False) -> nn.Module:
        """A model without anything to train, such as a reference or a metric, is sharded as well."""
        self._shard(model)
        made: nn.Module = super().prepare_model(model, device_placement, evaluation_mode)
        return made

    def prepare_optimizer(self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None) -> AcceleratedOptimizer:
        """``torch.optim.AdamW`` becomes ``unwall.AdamW``, any other element-wise one ``unwall.wrap`` of it."""
        if isinstance(optimizer, AcceleratedOptimizer):
            return super().prepare_optimizer(optimizer, device_placement)
        ours = optimizer if isinstance(optimizer, ShardedOptimizer) else rebuild(optimizer)
        return super().prepare_optimizer(prepared(ours, self), device_placement)

    def prepare_scheduler(self, scheduler: Any) -> Any:
        """A scheduler that was built around the optimizer given to ``prepare`` goes on with the one that came of it."""
        for optimizer in map(innermost, self._optimizers):
            if optimizer is not scheduler.optimizer and _ids(scheduler.optimizer.param_groups) == _ids(optimizer.param_groups):
                repoint(scheduler, scheduler.optimizer, optimizer)
        return super().prepare_scheduler(scheduler)

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> torch.Tensor:
        """Clips and gives the norm over all ranks. The multiplication is a part of the next step."""
        wanted = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        for optimizer in map(innermost, self._optimizers):
            trained = {id(param) for group in optimizer.param_groups for param in group["params"]}
            if trained == {id(param) for param in wanted if param.requires_grad}:
                self.unscale_gradients(optimizer)
                return optimizer.clip_grad_norm_(max_norm, norm_type)
        clipped: torch.Tensor = super().clip_grad_norm_(wanted, max_norm, norm_type)  # other parameters than an optimizer's
        return clipped

    def save_state(self, output_dir: str | None = None, safe_serialization: bool = True, **options: Any) -> Any:
        """As Accelerate, with models and optimizers written sharded (``unwall.save``). All ranks call it together."""
        models, optimizers = self._models, self._optimizers
        pairs = self._pairs()
        handle = self.register_save_state_pre_hook(lambda _, __, folder: _save_all(pairs, folder))
        self._models, self._optimizers = [], []
        try:
            return super().save_state(output_dir, safe_serialization, **options)
        finally:
            self._models, self._optimizers = models, optimizers
            handle.remove()

    def load_state(self, input_dir: str | None = None, load_kwargs: Any = None, **options: Any) -> None:
        """The inverse of ``save_state``, on any number of ranks. All ranks call it together."""
        models, optimizers = self._models, self._optimizers
        pairs = self._pairs()
        handle = self.register_load_state_pre_hook(lambda _, folder: _load_all(pairs, folder))
        self._models, self._optimizers = [], []
        try:
            super().load_state(input_dir, load_kwargs, **options)
        finally:
            self._models, self._optimizers = models, optimizers
            handle.remove()

    def _shard(self, model: nn.Module) -> None:
        found = engine_inside(model)
        if found is None:
            shard(model, self.plan)
        else:
            check_precision(model, found, self.mixed_precision, "mixed_precision")

    def _pairs(self) -> list[tuple[nn.Module, ShardedOptimizer | None]]:
        """Each model with the optimizer that trains it. ValueError where several do."""
        found: list[tuple[nn.Module, ShardedOptimizer | None]] = []
        for model in self._models:
            mine = [o for o in map(innermost, self._optimizers) if engine(model) in o.engines()]
            if len(mine) > 1:
                raise ValueError(
                    f"{len(mine)} optimizers train one {type(model).__name__}: unwall saves one optimizer per model"
                )
            found.append((model, mine[0] if mine else None))
        return found


def _ids(groups: Iterable[dict[str, Any]]) -> list[list[int]]:
    return [[id(param) for param in group["params"]] for group in groups]


def _save_all(pairs: list[tuple[nn.Module, ShardedOptimizer | None]], folder: str | os.PathLike[str]) -> None:
    for number, (model, optimizer) in enumerate(pairs):
        save(Path(folder, FOLDER, f"model_{number}"), model, optimizer, keep=1)


def _load_all(pairs: list[tuple[nn.Module, ShardedOptimizer | None]], folder: str | os.PathLike[str]) -> None:
    for number, (model, optimizer) in enumerate(pairs):
        load(Path(folder, FOLDER, f"model_{number}"), model, optimizer)
