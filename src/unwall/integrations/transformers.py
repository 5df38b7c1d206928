"""``Trainer`` of transformers, and a mixin for others such as TRL's, for sharded models."""

import os
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import Trainer as _Trainer
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME

from unwall.api import shard
from unwall.checkpoint.load_weights import load_weights
from unwall.checkpoint.public import load, save
from unwall.checkpoint.weights_out import export_weights
from unwall.integrations import adapters, arguments
from unwall.integrations.accelerate import prepared
from unwall.integrations.optimizers import innermost, sharded_class
from unwall.integrations.sharding import FOLDER, check_precision, engine_inside, plan_for
from unwall.optim.sharded import ShardedOptimizer
from unwall.plans import Plan

_SAYS = "TrainingArguments (bf16, fp16)"


class TrainerMixin:
    """In front of a trainer, makes it shard its model: ``class MyTrainer(TrainerMixin, SFTTrainer): pass``.

    ``plan``: an ``unwall.Plan``; bf16 and fp16 of the arguments decide the compute dtype, and gradient_accumulation_steps how
    many backwards add up. The model may be whole, built in ``unwall.init``, or sharded already (then without ``plan``). It is
    sharded when the optimizer is built, so after PEFT.

    A ``checkpoint-N`` directory holds the weights as transformers loads them, the sharded states in ``unwall`` and the
    trainer's own files; of a PEFT model only adapters and their states. All ranks call ``save_model`` together.
    """

    args: Any
    accelerator: Any
    model: nn.Module
    optimizer: Any
    lr_scheduler: Any
    state: Any
    processing_class: Any
    optimizer_cls_and_kwargs: Any

    def __init__(self, *args: Any, plan: Plan | None = None, **options: Any) -> None:
        self.plan = plan
        super().__init__(*args, **options)
        if self.optimizer is not None:
            try:
                innermost(self.optimizer)
            except TypeError:
                raise ValueError(
                    f"optimizers=({type(self.optimizer).__name__}, ...) was built before the model is sharded: give the class "
                    "and its options as optimizer_cls_and_kwargs, or shard the model and build unwall.AdamW before"
                ) from None

    # -- the model and its optimizer ----------------------------------------------------------------------------------

    def create_accelerator_and_postprocess(self) -> None:
        arguments.refuse(self.args)
        if self.args.n_gpu > 1:
            warnings.warn("one process trains on one GPU: start one per GPU with torchrun", stacklevel=3)
            self.args._n_gpu = 1
        super().create_accelerator_and_postprocess()  # type: ignore[misc]

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """The whole model may not fit there: ``shard`` brings what has a place on the device."""

    def _shard(self) -> None:
        precision, found = arguments.precision(self.args), engine_inside(self.model)
        if found is not None:
            check_precision(self.model, found, precision, _SAYS)
            return
        shard(self.model, plan_for(self.plan, precision, self.args.gradient_accumulation_steps, _SAYS))

    @property
    def _ours(self) -> ShardedOptimizer:
        return innermost(self.optimizer)

    def create_optimizer(self, model: nn.Module | None = None) -> Any:
        """Shards the model; then the optimizer that the arguments name, over its shards."""
        given = self.optimizer_cls_and_kwargs
        if self.optimizer is None and given is None:
            arguments.refuse_optimizer(self.args)
        self._shard()
        if self.optimizer is None:
            kind, options = given or self.get_optimizer_cls_and_kwargs(self.args, self.model)  # type: ignore[attr-defined]
            self.optimizer_cls_and_kwargs = (sharded_class(kind), options)
            try:
                super().create_optimizer(model)  # type: ignore[misc]
            finally:
                self.optimizer_cls_and_kwargs = given
        if isinstance(self.optimizer, ShardedOptimizer):
            self.optimizer = prepared(self.optimizer, self.accelerator)
        if self._ours.uses_at_once:
            arguments.refuse_clipping(self.args)
        return self.optimizer

    def evaluation_loop(self, *args: Any, **options: Any) -> Any:
        self._shard()
        return super().evaluation_loop(*args, **options)  # type: ignore[misc]

    def _clip_grad_norm(self, model: nn.Module) -> torch.Tensor:  # noqa: ARG002 (it is the optimizer that knows)
        self.accelerator.unscale_gradients(self.optimizer)
        return self._ours.clip_grad_norm_(self.args.max_grad_norm)

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:  # noqa: ARG002
        if grad_norm is not None:
            return grad_norm
        if self._ours.uses_at_once:
            return None  # the gradients are used by now: nobody knows their norm
        self.accelerator.unscale_gradients(self.optimizer)
        return self._ours.clip_grad_norm_(float("inf"))

    # -- what is saved ------------------------------------------------------------------------------------------------

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """A directory that transformers loads; of a PEFT model the adapters, in PEFT's format. All ranks call it together."""
        if engine_inside(self.model) is None:
            super().save_model(output_dir, _internal_call)  # type: ignore[misc]
            return
        folder = self.args.output_dir if output_dir is None else output_dir
        if adapters.is_peft(self.model):
            values = adapters.trained_values(self.model)
            if self.args.should_save:
                self._save(folder, state_dict=values)  # type: ignore[attr-defined]
        else:
            export_weights(self.model, folder)
            if self.args.should_save:
                self._save_beside(folder)
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)  # type: ignore[attr-defined]

    def _save_beside(self, folder: str) -> None:
        """What the trainer puts beside the weights: the tokenizer, and its arguments."""
        collator = getattr(self, "data_collator", None)
        words = self.processing_class if self.processing_class is not None else getattr(collator, "tokenizer", None)
        if words is not None:
            words.save_pretrained(folder)
        torch.save(self.args, os.path.join(folder, "training_args.bin"))

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if adapters.is_peft(self.model):
            adapters.save_adapters(output_dir, self.model, self._ours)
        else:
            save(Path(output_dir, FOLDER), self.model, self._ours, keep=1)
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), os.path.join(output_dir, SCHEDULER_NAME))

    # -- what is loaded -----------------------------------------------------------------------------------------------

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        """Sharded states are loaded once there is an optimizer; weights that the plain trainer has saved are loaded here."""
        if _is_ours(resume_from_checkpoint):
            return
        if engine_inside(self.model) is None or adapters.is_peft(self.model):
            super()._load_from_checkpoint(resume_from_checkpoint, model)  # type: ignore[misc]
        else:
            load_weights(self.model, resume_from_checkpoint)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        if _is_ours(checkpoint):
            self._load_states(checkpoint, self._ours)
        elif os.path.isfile(os.path.join(checkpoint, OPTIMIZER_NAME)):
            whole = torch.load(os.path.join(checkpoint, OPTIMIZER_NAME), map_location="cpu", weights_only=True, mmap=True)
            self._ours.load_state_dict(whole)
        scheduler = os.path.join(checkpoint, SCHEDULER_NAME)
        if os.path.isfile(scheduler):
            self.lr_scheduler.load_state_dict(torch.load(scheduler, weights_only=True))

    def _load_best_model(self) -> None:
        best = self.state.best_model_checkpoint
        if _is_ours(best):
            self._load_states(best, None)
        elif adapters.is_peft(self.model):
            super()._load_best_model()  # type: ignore[misc]
        else:
            load_weights(self.model, best)

    def _load_states(self, checkpoint: str, optimizer: ShardedOptimizer | None) -> None:
        if Path(checkpoint, FOLDER).is_dir():
            load(Path(checkpoint, FOLDER), self.model, optimizer)
        else:
            adapters.load_adapters(checkpoint, self.model, optimizer)


def _is_ours(checkpoint: str) -> bool:
    return Path(checkpoint, FOLDER).is_dir() or Path(checkpoint, adapters.FILE).is_file()


class Trainer(TrainerMixin, _Trainer):  # type: ignore[misc]
    """``transformers.Trainer`` with ``plan``. See ``TrainerMixin``."""
