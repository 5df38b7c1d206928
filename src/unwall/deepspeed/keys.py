"""What is known of each key of a DeepSpeed configuration: what it takes, and what becomes of it."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import torch

KeyPath = tuple[str, ...]


class Outcome(StrEnum):
    """What can become of a key."""

    PLAN = "plan"
    """A field of the Plan."""
    OPTIMIZER = "optimizer"
    """Something to give to ``unwall.AdamW`` or ``unwall.wrap``."""
    SCRIPT = "your script"
    """Something that the training loop does."""
    NOT_NEEDED = "not needed"
    """Switched off, or unwall does it without being told."""
    OPEN = "left open"
    """``"auto"`` in the file."""
    MISSING = "no counterpart"
    """Asked for, and unwall does not have it."""
    UNKNOWN = "unknown"
    """No key that this reader knows."""


@dataclass(frozen=True)
class _Takes:
    """Which values a key may have (besides ``"auto"`` and null, which count as not said)."""

    words: str
    test: Callable[[Any], bool]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _one_of(*names: str) -> _Takes:
    return _Takes("one of " + ", ".join(names), lambda value: isinstance(value, str) and value in names)


_BOOL = _Takes("true or false", lambda value: isinstance(value, bool))
_COUNT = _Takes("a whole number, 0 or more", lambda value: _is_number(value) and value >= 0 and value == value // 1)
_POSITIVE = _Takes("a whole number, 1 or more", lambda value: _COUNT.test(value) and value >= 1)
_NUMBER = _Takes("a number, 0 or more", lambda value: _is_number(value) and value >= 0)
_SHARE = _Takes("a number from 0 to 1", lambda value: _is_number(value) and 0 <= value <= 1)
_PAIR = _Takes("two numbers", lambda value: isinstance(value, list | tuple) and len(value) == 2 and all(map(_is_number, value)))
_TEXT = _Takes("a string", lambda value: isinstance(value, str))
_PATH = _Takes("a path", lambda value: isinstance(value, str | os.PathLike))
_ANY = _Takes("anything", lambda _: True)
_STAGE = _Takes("0, 1, 2 or 3", lambda value: _is_number(value) and value in (0, 1, 2, 3))
_DEVICE = _one_of("none", "cpu", "nvme")
DTYPES = {
    **dict.fromkeys(("fp32", "float32", "float", "torch.float32"), torch.float32),
    **dict.fromkeys(("fp16", "float16", "half", "torch.float16"), torch.float16),
    **dict.fromkeys(("bf16", "bfloat16", "torch.bfloat16"), torch.bfloat16),
}
_DTYPE = _one_of(*DTYPES)
OBJECT = _Takes("an object ({...})", lambda value: value is False or value == {})
ZERO = _Takes("an object ({...}), or true or false as in old files", lambda value: isinstance(value, bool) or value == {})


@dataclass(frozen=True)
class _Rule:
    """A known key: what it takes, and what becomes of it if no reader says otherwise."""

    takes: _Takes
    outcome: Outcome
    words: str
    off: object = False
    """For ``MISSING``: the value that asks for nothing."""


RULES: dict[KeyPath, _Rule] = {}


def _know(section: str, names: str, takes: _Takes, outcome: Outcome, words: str, off: object = False) -> None:
    for name in names.split():
        RULES[tuple(f"{section}.{name}".strip(".").split("."))] = _Rule(takes, outcome, words, off)


ZERO_SECTION = "zero_optimization"
PARAM, OPTIM = f"{ZERO_SECTION}.offload_param", f"{ZERO_SECTION}.offload_optimizer"
_CHECKPOINTING = "activation_checkpointing"
SECTIONS: dict[str, tuple[Outcome, str]] = {
    "scheduler": (Outcome.SCRIPT, "a torch.optim.lr_scheduler over the optimizer"),
    "compile": (Outcome.SCRIPT, "torch.compile on the model's modules"),
    "sparse_attention": (Outcome.SCRIPT, "unwall.sparse.use(model, unwall.sparse.from_deepspeed(config['sparse_attention']))"),
    **dict.fromkeys(
        ("tensorboard", "wandb", "csv_monitor", "comet", "flops_profiler", "comms_logger"),
        (Outcome.SCRIPT, "your logging; unwall.stats(model) has bytes and stalls"),
    ),
    **dict.fromkeys(("amp", "torch_autocast"), (Outcome.MISSING, "precision is Plan.compute_dtype")),
    **dict.fromkeys(("tensor_parallel", "hybrid_engine", "pipeline"), (Outcome.MISSING, "unwall is data-parallel")),
    **dict.fromkeys(
        (
            *("checkpoint", "nebula", "elasticity", "autotuning", "compression_training", "data_efficiency"),
            *("curriculum_learning", "progressive_layer_drop", "eigenvalue", "quantize_training"),
        ),
        (Outcome.MISSING, "unwall has nothing of the kind"),
    ),
}
"""Top-level sections of which every key becomes the same."""


def _know_zero() -> None:
    """The keys of ``zero_optimization``."""
    zero, needless, missing = ZERO_SECTION, Outcome.NOT_NEEDED, Outcome.MISSING
    _know(zero, "stage", _STAGE, Outcome.PLAN, "Plan.stage")
    budget = "Plan.device_bytes is the one budget of the device"
    for name in ("max_live_parameters", "max_reuse_distance", "prefetch_bucket_size", "param_persistence_threshold"):
        _know(zero, f"stage3_{name} {name}", _COUNT, needless, f"{budget}; what is kept and fetched ahead follows from it")
    _know(zero, "stage3_model_persistence_threshold model_persistence_threshold", _COUNT, needless, budget)
    size = "unwall cuts the model into groups of its own size"
    _know(zero, "reduce_bucket_size allgather_bucket_size sub_group_size", _COUNT, needless, size)
    _know(zero, "stage3_module_granularity_threshold module_granularity_threshold", _COUNT, needless, size)
    gathered = "state_dict() gives whole tensors on rank 0"
    save = "gather_16bit_weights_on_model_save"
    _know(zero, f"stage3_{save} {save} stage3_gather_fp16_weights_on_model_save", _BOOL, needless, gathered)
    _know(zero, "overlap_comm", _BOOL, needless, "collectives always overlap with compute")
    _know(zero, "contiguous_gradients", _BOOL, needless, "gradients are always copied into one flat buffer per group")
    collectives = "always reduce-scatter and all-gather of whole groups"
    _know(zero, "reduce_scatter allgather_partitions allgather_sequential", _BOOL, needless, collectives)
    _know(zero, "use_multi_rank_bucket_allreduce use_all_reduce_for_fetch_params", _BOOL, needless, collectives)
    _know(zero, "stage3_use_all_reduce_for_fetch_params grad_hooks legacy_stage1", _BOOL, needless, collectives)
    _know(zero, "round_robin_gradients", _BOOL, needless, "each rank copies only its own part")
    plain = "parameters stay plain nn.Parameters and constructors run as they are"
    _know(zero, "memory_efficient_linear override_module_apply", _BOOL, needless, plain)
    _know(zero, "log_trace_cache_warnings enable_sanity_checks", _BOOL, needless, "stats(model) counts what the trace missed")
    free = "ranks may use modules in different orders"
    _know(f"{zero}.leaf_module", "classes names name_suffixes", _ANY, needless, free)
    _know(zero, "ignore_unused_parameters", _BOOL, missing, "a parameter without a gradient is skipped, never an error", True)
    checkpoint = "unwall does not read DeepSpeed's checkpoints"
    _know(zero, "elastic_checkpoint load_from_fp32_weights pipeline_loading_checkpoint", _BOOL, missing, checkpoint)
    _know(zero, "zero_quantized_weights zero_quantized_gradients", _BOOL, needless, "off")
    kept = "frozen parameters travel as the others do (Plan.gather_dtype), and are kept as they are"
    _know(zero, "zero_quantized_nontrainable_weights", _BOOL, missing, kept)
    feedback = "Plan.reduce_feedback adds what rounding has left to the next gradient, all of it, and never forgets it"
    _know(f"{zero}.zeropp_loco_param", "err_beta reset_T", _NUMBER, missing, feedback, off=None)
    whole = "states are cut over all data-parallel ranks, not over subgroups"
    _know(zero, "zero_hpz_partition_size", _COUNT, needless, "off")
    _know(zero, "mics_shard_size", _ANY, missing, whole, off=-1)
    _know(zero, "mics_hierarchical_params_gather", _BOOL, missing, whole)


def _know_offload() -> None:
    """Old and new keys of offloading."""
    _know(ZERO_SECTION, "cpu_offload cpu_offload_param cpu_offload_params", _BOOL, Outcome.NOT_NEEDED, "off")
    pinned = "unwall page-locks what crosses the link, and nothing else"
    _know(ZERO_SECTION, "cpu_offload_use_pin_memory", _BOOL, Outcome.NOT_NEEDED, pinned)
    for section in (PARAM, OPTIM):
        _know(section, "device", _DEVICE, Outcome.PLAN, "a tier of the Plan")
        _know(section, "nvme_path", _PATH, Outcome.NOT_NEEDED, "nothing here goes to nvme")
        _know(section, "pin_memory", _BOOL, Outcome.NOT_NEEDED, pinned)
        _know(section, "buffer_count buffer_size", _COUNT, Outcome.NOT_NEEDED, "unwall sizes its own buffers")
    _know(PARAM, "max_in_cpu", _COUNT, Outcome.NOT_NEEDED, "Plan.host_bytes is the one budget of the host")
    order = "the engine orders reads, updates and writes itself"
    _know(OPTIM, "pipeline pipeline_read pipeline_write", _BOOL, Outcome.NOT_NEEDED, order)
    _know(OPTIM, "fast_init", _BOOL, Outcome.NOT_NEEDED, "states begin as zeros on their tier")
    ratio = "all of it goes to that tier; to split by bytes write Plan(optimizer='auto', device_bytes=...)"
    _know(OPTIM, "ratio", _SHARE, Outcome.MISSING, ratio, off=1)
    _know(OPTIM, "super_offload", _BOOL, Outcome.MISSING, "unwall has its own overlapped update")
    _know(OPTIM, "cpuadam_cores_perc", _SHARE, Outcome.NOT_NEEDED, "unwall's workers take the cores they find")


def _know_precision() -> None:
    """bf16, fp16 and the dtypes of sums."""
    fp32 = "the master copy and the moments are always fp32"
    for section in ("bf16", "bfloat16"):
        _know(section, "enabled", _BOOL, Outcome.NOT_NEEDED, "off")
        _know(section, "immediate_grad_update", _BOOL, Outcome.NOT_NEEDED, "gradients are reduced as they come in backward")
        _know(section, "check_grad_overflow", _BOOL, Outcome.MISSING, "steps are skipped for overflow in fp16 only")
        _know(section, "bf16_master_weights_and_grads bf16_optimizer_states", _BOOL, Outcome.MISSING, fp32)
    _know("fp16", "enabled", _BOOL, Outcome.NOT_NEEDED, "off")
    _know("fp16", "auto_cast", _BOOL, Outcome.NOT_NEEDED, "modules cast fp32 inputs to what they compute in")
    _know(
        "fp16", "loss_scale", _NUMBER, Outcome.MISSING, "the scale is dynamic; optimizer.scaler.scale sets where it starts", 0
    )
    _know("fp16", "initial_scale_power", _NUMBER, Outcome.OPTIMIZER, "optimizer.scaler.scale")
    _know("fp16", "loss_scale_window", _POSITIVE, Outcome.OPTIMIZER, "optimizer.scaler.growth_interval")
    _know("fp16", "hysteresis", _COUNT, Outcome.MISSING, "the first overflow halves the scale", off=1)
    _know("fp16", "consecutive_hysteresis", _BOOL, Outcome.MISSING, "the first overflow halves the scale")
    _know("fp16", "min_loss_scale", _NUMBER, Outcome.MISSING, "the scale may fall to 2**-14", off=2.0**-14)
    _know("fp16", "fp16_master_weights_and_grads", _BOOL, Outcome.MISSING, fp32)
    _know("", "communication_data_type", _DTYPE, Outcome.PLAN, "Plan.reduce_dtype")
    _know("", "fp32_allreduce", _BOOL, Outcome.NOT_NEEDED, "off")
    _know("data_types", "grad_accum_dtype", _DTYPE, Outcome.NOT_NEEDED, "several backward calls always add up in fp32")
    divided = "gradients are divided by the number of ranks, in fp16 before the sum"
    _know("", "prescale_gradients", _BOOL, Outcome.NOT_NEEDED, divided)
    _know("", "gradient_predivide_factor", _NUMBER, Outcome.NOT_NEEDED, divided)


def _know_rest() -> None:
    """Batch, optimizer, disk I/O, activations, logging."""
    needless, missing, script = Outcome.NOT_NEEDED, Outcome.MISSING, Outcome.SCRIPT
    _know("", "train_batch_size", _POSITIVE, script, "what your data loader gives all ranks together in one step")
    _know("", "train_micro_batch_size_per_gpu", _POSITIVE, script, "the batch size of your data loader on each rank")
    _know("", "gradient_accumulation_steps", _POSITIVE, script, "how often you call backward() before optimizer.step()")
    _know("", "dataloader_drop_last", _BOOL, script, "drop_last of your data loader")
    _know("", "gradient_clipping", _NUMBER, Outcome.OPTIMIZER, "max_grad_norm")
    _know("optimizer", "type", _TEXT, Outcome.OPTIMIZER, "the optimizer")
    _know("optimizer", "legacy_fusion", _BOOL, needless, "the update is always fused")
    for name, takes in (("lr", _NUMBER), ("betas", _PAIR), ("weight_decay", _NUMBER), ("max_grad_norm", _NUMBER)):
        _know("optimizer.params", name, takes, Outcome.OPTIMIZER, name)
    _know("optimizer.params", "eps", _ANY, Outcome.OPTIMIZER, "eps")
    _know("optimizer.params", "torch_adam adam_w_mode bias_correction amsgrad", _BOOL, needless, "as in unwall.AdamW")
    _know("", "zero_allow_untested_optimizer zero_force_ds_cpu_optimizer", _BOOL, needless, "unwall.wrap tries an optimizer")
    disk = "unwall's disk engine has its own requests and queue"
    _know("aio", "block_size queue_depth thread_count intra_op_parallelism", _COUNT, needless, disk)
    _know("aio", "single_submit overlap_events", _BOOL, needless, disk)
    _know("aio", "use_gds", _BOOL, missing, "the disk is read through host memory")
    host = "unwall moves what its own checkpoints hold: Plan(activations='host'), without torch.utils.checkpoint in the model"
    _know(_CHECKPOINTING, "cpu_checkpointing", _BOOL, missing, host)
    _know(_CHECKPOINTING, "partition_activations", _BOOL, missing, "over a mesh with 'tp': Plan(partition_activations=True)")
    model = "activations are checkpointed where the model calls torch.utils.checkpoint"
    _know(_CHECKPOINTING, "contiguous_memory_optimization synchronize_checkpoint_boundary", _BOOL, needless, model)
    _know(_CHECKPOINTING, "number_checkpoints", _COUNT, needless, model)
    _know(_CHECKPOINTING, "profile", _BOOL, needless, "torch.profiler shows the recomputation")
    stats = "unwall prints nothing; unwall.stats(model) has bytes and stalls"
    _know("", "steps_per_print", _NUMBER, needless, stats)
    _know("", "wall_clock_breakdown memory_breakdown dump_state", _BOOL, needless, stats)
    _know("", "allgather_size vocabulary_size", _COUNT, needless, "unwall cuts the model into groups of its own size")
    _know("", "disable_allgather", _BOOL, missing, "parameters are always gathered")
    _know("", "sparse_gradients", _BOOL, missing, "gradients are dense")
    _know("", "seq_parallel_communication_data_type", _ANY, missing, "no sequence parallelism", off=None)
    _know("", "sequence_parallel_size", _COUNT, missing, "no sequence parallelism", off=1)


def _know_objects() -> None:
    """The sections themselves, where a file has them empty or switched off."""
    inner = f"{PARAM} {OPTIM} {ZERO_SECTION}.leaf_module {ZERO_SECTION}.zeropp_loco_param optimizer.params"
    outer = f"bf16 bfloat16 fp16 data_types optimizer aio {_CHECKPOINTING} {' '.join(SECTIONS)}"
    _know("", f"{inner} {outer}", OBJECT, Outcome.NOT_NEEDED, "empty or off")
    _know("", ZERO_SECTION, ZERO, Outcome.PLAN, "Plan.stage")


_know_zero()
_know_offload()
_know_precision()
_know_rest()
_know_objects()
