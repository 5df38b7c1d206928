"""Which ``TrainingArguments`` of transformers work with a sharded model. What cannot is refused, in one sentence."""

from typing import Any

import torch

_NAMED = ("adamw_torch", "adamw_torch_fused", "sgd", "adagrad", "rmsprop")
"""Names of optimizers whose update is element-wise, and which torch has."""
_REFUSED = {
    "deepspeed": "deepspeed: unwall is the ZeRO here; leave it out, Plan.from_deepspeed(config) reads the config",
    "fsdp": "fsdp: unwall partitions the model itself; leave it out",
    "parallelism_config": "parallelism_config: unwall divides the model over all ranks as data parallelism; leave it out",
    "torch_compile": "torch_compile: Accelerate does not compile a sharded model; call .compile() on its blocks before",
    "fp16_full_eval": "fp16_full_eval casts the whole model: a sharded one evaluates in its compute dtype; use fp16",
    "bf16_full_eval": "bf16_full_eval casts the whole model: a sharded one evaluates in its compute dtype; use bf16",
    "save_on_each_node": "save_on_each_node: each rank writes its part, all of them into one directory that every node sees",
}


def refuse(args: Any) -> None:
    """ValueError for an option that a sharded model cannot honour. ``args``: the ``TrainingArguments``."""
    for name, why in _REFUSED.items():
        if getattr(args, name, None):
            raise ValueError(f"TrainingArguments: {why}")
    even = getattr(getattr(args, "accelerator_config", None), "even_batches", True)
    if not even and args.world_size > 1:
        raise ValueError("TrainingArguments: even_batches=False: all ranks must run the same number of batches; leave it out")
    if args.device.type == "cpu" and torch.cuda.is_available():
        raise ValueError("TrainingArguments: use_cpu beside a GPU: hide the GPU (CUDA_VISIBLE_DEVICES='') to train on the CPU")


def refuse_optimizer(args: Any) -> None:
    """ValueError for an optimizer, by its name, that does not update each element by itself, or is of another library."""
    name = getattr(args.optim, "value", args.optim)
    if name not in _NAMED:
        raise ValueError(
            f"TrainingArguments: optim={name!r} cannot update shards: use one of {', '.join(_NAMED)}, or give an element-wise "
            "optimizer class as optimizer_cls_and_kwargs"
        )


def refuse_clipping(args: Any) -> None:
    """ValueError where gradients are to be clipped that an optimizer uses before their norm is known."""
    if args.max_grad_norm > 0:
        raise ValueError(
            f"TrainingArguments: max_grad_norm={args.max_grad_norm}: an optimizer with update_in_backward=True uses gradients "
            "before their norm is known; write max_grad_norm=0, or leave update_in_backward out"
        )


def precision(args: Any) -> str:
    """In Accelerate's words: "no", "fp16" or "bf16"."""
    return "fp16" if args.fp16 else "bf16" if args.bf16 else "no"
