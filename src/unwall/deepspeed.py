"""A DeepSpeed configuration as a ``Plan``, with an account of every key.

[Note: account]
A leaf is a value of the configuration that is not itself a non-empty object. Every leaf gets exactly one entry that says what
it became. The readers below speak first, for the keys that decide something together; whatever they leave unsaid gets the words
of its row in ``_RULES``, of its section in ``_SECTIONS``, or counts as unknown. A key can be useless here, never ignored.
"""

import difflib
import json
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import torch

from unwall.plan import Plan, PlanError

KeyPath = tuple[str, ...]


class Kind(StrEnum):
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


_TO_DO = (Kind.UNKNOWN, Kind.MISSING, Kind.OPTIMIZER, Kind.SCRIPT)


@dataclass(frozen=True)
class Entry:
    """What one key became."""

    key: str
    """With the sections it is in: ``zero_optimization.offload_optimizer.device``."""
    value: object
    kind: Kind
    became: str
    """In words."""

    def __str__(self) -> str:
        return f"{self.key} = {_short(self.value)} -> {self.kind}: {self.became}"


@dataclass(frozen=True)
class Translation:
    """A plan and how it came about. ``print`` shows it as a table."""

    plan: Plan
    entries: tuple[Entry, ...]
    """One for each leaf of the configuration, in its order."""
    notes: tuple[str, ...]
    """What follows from keys that are not there, or from several together."""

    def to_do(self) -> list[str]:
        """What the plan does not carry, one line each: keys without a counterpart, unknown keys, what the script must do."""
        return [str(entry) for kind in _TO_DO for entry in self.entries if entry.kind is kind] + list(self.notes)

    def __str__(self) -> str:
        rows = [("key", "value", "became")]
        rows += [(entry.key, _short(entry.value), f"{entry.kind}: {entry.became}") for entry in self.entries]
        wide = [max(len(row[column]) for row in rows) for column in (0, 1)]
        lines = [f"{key:<{wide[0]}}  {value:<{wide[1]}}  {became}" for key, value, became in rows]
        return "\n".join([str(self.plan), *lines, *self.notes])


def read(config: str | Path | Mapping[str, Any]) -> dict[str, Any]:
    """The configuration as a dict: from a JSON file, or the dict itself. PlanError for a file that cannot be read."""
    if isinstance(config, Mapping):
        return dict(config)
    if not isinstance(config, str | os.PathLike):
        raise PlanError(f"a DeepSpeed config is the path of a JSON file or a dict, got {type(config).__name__}")
    try:
        found = json.loads(Path(config).read_text(encoding="utf-8-sig"), object_pairs_hook=_without_duplicates)
    except OSError as error:
        raise PlanError(f"the DeepSpeed config {config} cannot be read: {error.strerror or error}") from error
    except PlanError as error:
        raise PlanError(f"the DeepSpeed config {config}: {error}") from error
    except ValueError as error:
        raise PlanError(f"the DeepSpeed config {config} is not valid JSON: {error}") from error
    if not isinstance(found, dict):
        raise PlanError(f"the DeepSpeed config {config} must hold a JSON object, got {type(found).__name__}")
    return found


def translate(config: Mapping[str, Any]) -> Translation:
    """What a DeepSpeed configuration means here. Changes and prints nothing; PlanError for one that contradicts itself."""
    account = _Account(config)
    stage = _read_stage(account)
    fields: dict[str, Any] = {"stage": stage, **_read_places(account, stage)}
    dtype = fields["compute_dtype"] = _read_precision(account)
    fields["reduce_dtype"] = _read_reduction(account)
    _read_loss_scale(account, dtype)
    _read_optimizer(account)
    _read_clipping(account)
    _read_batch(account)
    entries = tuple(account.entry(path) for path in account.leaves)
    return Translation(Plan(**fields), entries, tuple(account.notes))


def plan_of(config: str | Path | Mapping[str, Any]) -> Plan:
    """For ``Plan.from_deepspeed``: the plan, and one warning that lists all that it does not carry."""
    translation = translate(read(config))
    to_do = translation.to_do()
    if to_do:
        lines = "\n  ".join(["this Plan does not carry everything in the DeepSpeed config:", *to_do])
        warnings.warn(f"{lines}\nAll keys: unwall.deepspeed.translate", UserWarning, stacklevel=3)
    return translation.plan


# -- what is known of each key ------------------------------------------------------------------------------------------------


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
_DTYPES = {
    **dict.fromkeys(("fp32", "float32", "float", "torch.float32"), torch.float32),
    **dict.fromkeys(("fp16", "float16", "half", "torch.float16"), torch.float16),
    **dict.fromkeys(("bf16", "bfloat16", "torch.bfloat16"), torch.bfloat16),
}
_DTYPE = _one_of(*_DTYPES)
_OBJECT = _Takes("an object ({...})", lambda value: value is False or value == {})
_ZERO = _Takes("an object ({...}), or true or false as in old files", lambda value: isinstance(value, bool) or value == {})


@dataclass(frozen=True)
class _Rule:
    """A known key: what it takes, and what becomes of it if no reader says otherwise."""

    takes: _Takes
    kind: Kind
    words: str
    off: object = False
    """For ``MISSING``: the value that asks for nothing."""


_RULES: dict[KeyPath, _Rule] = {}


def _know(section: str, names: str, takes: _Takes, kind: Kind, words: str, off: object = False) -> None:
    for name in names.split():
        _RULES[tuple(f"{section}.{name}".strip(".").split("."))] = _Rule(takes, kind, words, off)


_ZERO_SECTION = "zero_optimization"
_PARAM, _OPTIM = f"{_ZERO_SECTION}.offload_param", f"{_ZERO_SECTION}.offload_optimizer"
_CHECKPOINTING = "activation_checkpointing"
_SECTIONS: dict[str, tuple[Kind, str]] = {
    "scheduler": (Kind.SCRIPT, "a torch.optim.lr_scheduler over the optimizer"),
    "compile": (Kind.SCRIPT, "torch.compile on the model's modules"),
    **dict.fromkeys(
        ("tensorboard", "wandb", "csv_monitor", "comet", "flops_profiler", "comms_logger"),
        (Kind.SCRIPT, "your logging; unwall.stats(model) has bytes and stalls"),
    ),
    **dict.fromkeys(("amp", "torch_autocast"), (Kind.MISSING, "precision is Plan.compute_dtype")),
    **dict.fromkeys(("tensor_parallel", "hybrid_engine", "pipeline"), (Kind.MISSING, "unwall is data-parallel")),
    **dict.fromkeys(
        (
            *("checkpoint", "nebula", "elasticity", "autotuning", "compression_training", "data_efficiency"),
            *("curriculum_learning", "progressive_layer_drop", "eigenvalue", "quantize_training", "sparse_attention"),
        ),
        (Kind.MISSING, "unwall has nothing of the kind"),
    ),
}
"""Top-level sections of which every key becomes the same."""


def _know_zero() -> None:
    """The keys of ``zero_optimization``."""
    zero, needless, missing = _ZERO_SECTION, Kind.NOT_NEEDED, Kind.MISSING
    _know(zero, "stage", _STAGE, Kind.PLAN, "Plan.stage")
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
    _know(zero, "contiguous_gradients", _BOOL, needless, "gradients are always copied into one flat buffer a group")
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
    quantized = "collectives are not compressed"
    _know(zero, "zero_quantized_weights zero_quantized_gradients", _BOOL, missing, quantized)
    _know(zero, "zero_quantized_nontrainable_weights", _BOOL, missing, "frozen parameters are not quantized")
    _know(f"{zero}.zeropp_loco_param", "err_beta reset_T", _NUMBER, missing, quantized, off=None)
    whole = "states are cut over all data-parallel ranks, not over subgroups"
    _know(zero, "zero_hpz_partition_size", _COUNT, missing, whole, off=1)
    _know(zero, "mics_shard_size", _ANY, missing, whole, off=-1)
    _know(zero, "mics_hierarchical_params_gather", _BOOL, missing, whole)


def _know_offload() -> None:
    """Old and new keys of offloading."""
    _know(_ZERO_SECTION, "cpu_offload cpu_offload_param cpu_offload_params", _BOOL, Kind.NOT_NEEDED, "off")
    pinned = "unwall page-locks what crosses the link, and nothing else"
    _know(_ZERO_SECTION, "cpu_offload_use_pin_memory", _BOOL, Kind.NOT_NEEDED, pinned)
    for section in (_PARAM, _OPTIM):
        _know(section, "device", _DEVICE, Kind.PLAN, "a tier of the Plan")
        _know(section, "nvme_path", _PATH, Kind.NOT_NEEDED, "nothing here goes to nvme")
        _know(section, "pin_memory", _BOOL, Kind.NOT_NEEDED, pinned)
        _know(section, "buffer_count buffer_size", _COUNT, Kind.NOT_NEEDED, "unwall sizes its own buffers")
    _know(_PARAM, "max_in_cpu", _COUNT, Kind.NOT_NEEDED, "Plan.host_bytes is the one budget of the host")
    order = "the engine orders reads, updates and writes itself"
    _know(_OPTIM, "pipeline pipeline_read pipeline_write", _BOOL, Kind.NOT_NEEDED, order)
    _know(_OPTIM, "fast_init", _BOOL, Kind.NOT_NEEDED, "states begin as zeros on their tier")
    ratio = "all of it goes to that tier; to split by bytes write Plan(optimizer='auto', device_bytes=...)"
    _know(_OPTIM, "ratio", _SHARE, Kind.MISSING, ratio, off=1)
    _know(_OPTIM, "super_offload", _BOOL, Kind.MISSING, "unwall has its own overlapped update")
    _know(_OPTIM, "cpuadam_cores_perc", _SHARE, Kind.NOT_NEEDED, "unwall's workers take the cores they find")


def _know_precision() -> None:
    """bf16, fp16 and the dtypes of sums."""
    fp32 = "the master copy and the moments are always fp32"
    for section in ("bf16", "bfloat16"):
        _know(section, "enabled", _BOOL, Kind.NOT_NEEDED, "off")
        _know(section, "immediate_grad_update", _BOOL, Kind.NOT_NEEDED, "gradients are reduced as they come in backward")
        _know(section, "check_grad_overflow", _BOOL, Kind.MISSING, "steps are skipped for overflow in fp16 only")
        _know(section, "bf16_master_weights_and_grads bf16_optimizer_states", _BOOL, Kind.MISSING, fp32)
    _know("fp16", "enabled", _BOOL, Kind.NOT_NEEDED, "off")
    _know("fp16", "auto_cast", _BOOL, Kind.NOT_NEEDED, "modules cast fp32 inputs to what they compute in")
    _know("fp16", "loss_scale", _NUMBER, Kind.MISSING, "the scale is dynamic; optimizer.scaler.scale sets where it starts", 0)
    _know("fp16", "initial_scale_power", _NUMBER, Kind.OPTIMIZER, "optimizer.scaler.scale")
    _know("fp16", "loss_scale_window", _POSITIVE, Kind.OPTIMIZER, "optimizer.scaler.growth_interval")
    _know("fp16", "hysteresis", _COUNT, Kind.MISSING, "the first overflow halves the scale", off=1)
    _know("fp16", "consecutive_hysteresis", _BOOL, Kind.MISSING, "the first overflow halves the scale")
    _know("fp16", "min_loss_scale", _NUMBER, Kind.MISSING, "the scale may fall to 2**-14", off=2.0**-14)
    _know("fp16", "fp16_master_weights_and_grads", _BOOL, Kind.MISSING, fp32)
    _know("", "communication_data_type", _DTYPE, Kind.PLAN, "Plan.reduce_dtype")
    _know("", "fp32_allreduce", _BOOL, Kind.NOT_NEEDED, "off")
    _know("data_types", "grad_accum_dtype", _DTYPE, Kind.NOT_NEEDED, "several backward calls always add up in fp32")
    divided = "gradients are divided by the number of ranks, in fp16 before the sum"
    _know("", "prescale_gradients", _BOOL, Kind.NOT_NEEDED, divided)
    _know("", "gradient_predivide_factor", _NUMBER, Kind.NOT_NEEDED, divided)


def _know_rest() -> None:
    """Batch, optimizer, disk I/O, activations, logging."""
    needless, missing, script = Kind.NOT_NEEDED, Kind.MISSING, Kind.SCRIPT
    _know("", "train_batch_size", _POSITIVE, script, "what your data loader gives all ranks together in one step")
    _know("", "train_micro_batch_size_per_gpu", _POSITIVE, script, "the batch size of your data loader on each rank")
    _know("", "gradient_accumulation_steps", _POSITIVE, script, "how often you call backward() before optimizer.step()")
    _know("", "dataloader_drop_last", _BOOL, script, "drop_last of your data loader")
    _know("", "gradient_clipping", _NUMBER, Kind.OPTIMIZER, "max_grad_norm")
    _know("optimizer", "type", _TEXT, Kind.OPTIMIZER, "the optimizer")
    _know("optimizer", "legacy_fusion", _BOOL, needless, "the update is always fused")
    for name, takes in (("lr", _NUMBER), ("betas", _PAIR), ("weight_decay", _NUMBER), ("max_grad_norm", _NUMBER)):
        _know("optimizer.params", name, takes, Kind.OPTIMIZER, name)
    _know("optimizer.params", "eps", _ANY, Kind.OPTIMIZER, "eps")
    _know("optimizer.params", "torch_adam adam_w_mode bias_correction amsgrad", _BOOL, needless, "as in unwall.AdamW")
    _know("", "zero_allow_untested_optimizer zero_force_ds_cpu_optimizer", _BOOL, needless, "unwall.wrap tries an optimizer")
    disk = "unwall's disk engine has its own requests and queue"
    _know("aio", "block_size queue_depth thread_count intra_op_parallelism", _COUNT, needless, disk)
    _know("aio", "single_submit overlap_events", _BOOL, needless, disk)
    _know("aio", "use_gds", _BOOL, missing, "the disk is read through host memory")
    host = "Plan(activations='host') is not built yet, so they stay on the device; use torch.utils.checkpoint to hold fewer"
    _know(_CHECKPOINTING, "cpu_checkpointing", _BOOL, missing, host)
    _know(_CHECKPOINTING, "partition_activations", _BOOL, missing, "there are no model-parallel ranks to cut activations over")
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
    inner = f"{_PARAM} {_OPTIM} {_ZERO_SECTION}.leaf_module {_ZERO_SECTION}.zeropp_loco_param optimizer.params"
    outer = f"bf16 bfloat16 fp16 data_types optimizer aio {_CHECKPOINTING} {' '.join(_SECTIONS)}"
    _know("", f"{inner} {outer}", _OBJECT, Kind.NOT_NEEDED, "empty or off")
    _know("", _ZERO_SECTION, _ZERO, Kind.PLAN, "Plan.stage")


_know_zero()
_know_offload()
_know_precision()
_know_rest()
_know_objects()


# -- the account --------------------------------------------------------------------------------------------------------------


class _Account:
    """The leaves of a configuration and what was said of them. [Note: account]"""

    def __init__(self, config: Mapping[str, Any]) -> None:
        if not isinstance(config, Mapping):
            raise PlanError(f"a DeepSpeed config is a dict here, got {type(config).__name__}")
        self.leaves: dict[KeyPath, Any] = dict(_leaves(config, ()))
        self.notes: list[str] = []
        self._said: dict[KeyPath, tuple[Kind, str]] = {}
        for path, value in self.leaves.items():
            _check(path, value)

    def get(self, key: str) -> Any:
        """The value of a key; None if it is absent, null or ``"auto"``."""
        value = self.leaves.get(_path(key))
        return None if _is_auto(value) else value

    def is_open(self, key: str) -> bool:
        return _is_auto(self.leaves.get(_path(key)))

    def say(self, key: str, kind: Kind, words: str) -> None:
        """What a key became, once, where it is there. (Of null and ``"auto"`` only the kind counts.)"""
        assert _path(key) not in self._said, key
        self._said[_path(key)] = kind, words

    def under(self, section: str) -> list[KeyPath]:
        """The leaves inside a section."""
        prefix = _path(section)
        return [path for path in self.leaves if path[: len(prefix)] == prefix and path != prefix]

    def entry(self, path: KeyPath) -> Entry:
        kind, words = self._became(path, self.leaves[path])
        return Entry(".".join(path), self.leaves[path], kind, words)

    def _became(self, path: KeyPath, value: Any) -> tuple[Kind, str]:
        rule, section, said = _RULES.get(path), _SECTIONS.get(path[0]), self._said.get(path)
        default = said or ((rule.kind, rule.words) if rule is not None else section)
        if default is None:
            return Kind.UNKNOWN, _nearest(path)
        if value is None:
            return Kind.NOT_NEEDED, "null, as if it were not there"
        if _is_auto(value):
            return Kind.OPEN, "your script decides" if default[0] in (Kind.OPTIMIZER, Kind.SCRIPT) else "unwall decides"
        if said is None and rule is not None and rule.kind is Kind.MISSING and value == rule.off:
            return Kind.NOT_NEEDED, "asks for nothing special"
        if rule is None and section is not None and self.get(f"{path[0]}.enabled") is False:
            return Kind.NOT_NEEDED, "switched off"
        return default


def _leaves(value: Mapping[str, Any], path: KeyPath) -> Iterator[tuple[KeyPath, Any]]:
    for key, inner in value.items():
        if not isinstance(key, str):
            raise PlanError(f"keys of a DeepSpeed config are strings, got {key!r} in {'.'.join(path) or 'the config'}")
        if isinstance(inner, Mapping) and inner:
            yield from _leaves(inner, (*path, key))
        else:
            yield (*path, key), inner


def _check(path: KeyPath, value: Any) -> None:
    """Refuses a value of the wrong type, and an object where a plain value belongs."""
    for end in range(1, len(path)):
        rule = _RULES.get(path[:end])
        if rule is not None and rule.takes not in (_OBJECT, _ZERO):
            raise PlanError(f"{'.'.join(path[:end])} is {rule.takes.words} in a DeepSpeed config, got an object")
    rule = _RULES.get(path)
    if rule is not None and value is not None and not _is_auto(value) and not rule.takes.test(value):
        raise PlanError(f"{'.'.join(path)} is {rule.takes.words} in a DeepSpeed config, got {value!r}")


def _nearest(path: KeyPath) -> str:
    """What an unknown key may have been meant to be."""
    known = {rule[:end] for rule in _RULES for end in range(1, len(rule) + 1)}
    strange = next((path[:end] for end in range(1, len(path) + 1) if path[:end] not in known), path)
    siblings = sorted(rule[-1] for rule in known if rule[:-1] == strange[:-1])
    close = difflib.get_close_matches(strange[-1], siblings, n=1)
    return f"has no effect; did you mean {'.'.join((*strange[:-1], close[0]))}?" if close else "has no effect"


def _path(key: str) -> KeyPath:
    return tuple(key.split("."))


def _is_auto(value: object) -> bool:
    return isinstance(value, str) and value == "auto"


def _short(value: object, limit: int = 40) -> str:
    shown = repr(value)
    return shown if len(shown) <= limit else shown[: limit - 3] + "..."


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise PlanError(f"the key {key} is there twice in one object")
        found[key] = value
    return found


# -- readers: keys that decide something --------------------------------------------------------------------------------------


def _read_stage(account: _Account) -> int:
    key = f"{_ZERO_SECTION}.stage"
    legacy, stage = account.get(_ZERO_SECTION), account.get(key)
    if isinstance(legacy, bool):
        account.say(_ZERO_SECTION, Kind.PLAN, f"Plan.stage={int(legacy)} (in old files true meant stage 1)")
        return int(legacy)
    account.say(_ZERO_SECTION, Kind.NOT_NEEDED, "empty")
    if stage is not None:
        account.say(key, Kind.PLAN, f"Plan.stage={int(stage)}")
        return int(stage)
    if account.is_open(key) or account.is_open(_ZERO_SECTION):
        return Plan().stage
    account.notes.append(f"no {key}: Plan.stage=0, which is DeepSpeed's default")
    return 0


_TIERS = {"none": "device", "cpu": "host", "nvme": "disk"}


def _read_places(account: _Account, stage: int) -> dict[str, Any]:
    """``params``, ``optimizer`` and ``disk`` of the plan."""
    params = _offloaded(account, _PARAM, ("cpu_offload_param", "cpu_offload_params"))
    optimizer = _offloaded(account, _OPTIM, ("cpu_offload",))
    if params in ("cpu", "nvme") and stage < 3:
        raise PlanError(
            f"{_PARAM}.device is {params!r} with {_ZERO_SECTION}.stage {stage}: parameters are offloaded at stage 3 only; "
            f"write stage 3 or leave {_PARAM} out"
        )
    fields = {"params": _TIERS.get(params or "", "auto"), "optimizer": _TIERS.get(optimizer or "", "auto")}
    words = f"Plan.params={fields['params']!r}"
    if fields["params"] == "device" and stage == 3 and fields["optimizer"] in ("host", "disk"):
        # Parameters on the device beside an offloaded optimizer are held whole there, which stage 3 is meant to avoid.
        fields["params"] = "auto"
        words = "Plan.params='auto': kept on the device as far as it has room ('device' would hold them whole on every rank)"
    elif fields["params"] in ("host", "disk") and fields["optimizer"] == "auto":
        words += "; optimizer state follows there, unless Plan.optimizer says otherwise"
    elif fields["params"] in ("host", "disk") and fields["optimizer"] == "device":
        words += ", for frozen parameters: the others live beside their optimizer state, on the device"
    account.say(f"{_PARAM}.device", Kind.PLAN, words)
    account.say(f"{_OPTIM}.device", Kind.PLAN, f"Plan.optimizer={fields['optimizer']!r}")
    return {**fields, "disk": _read_disk(account, params, optimizer)}


def _offloaded(account: _Account, section: str, old_names: tuple[str, ...]) -> str | None:
    """The DeepSpeed device of a state, by its new or old name; None where nothing is said."""
    device: str | None = account.get(f"{section}.device")
    if device is None and account.under(section) and not account.is_open(f"{section}.device"):
        account.notes.append(f"{section} has no device: nothing is offloaded, which is DeepSpeed's default")
    field = "params" if section == _PARAM else "optimizer"
    for name in old_names:
        key = f"{_ZERO_SECTION}.{name}"
        if account.get(key) is not True:
            continue
        if device not in (None, "cpu"):
            raise PlanError(f"{key} is true, but {section}.device is {device!r}: leave one of them out")
        account.say(key, Kind.PLAN, f"Plan.{field}='host' (an old name of {section}.device='cpu')")
        device = "cpu"
    return device


def _read_disk(account: _Account, params: str | None, optimizer: str | None) -> Any:
    """The directories: two different ones become two stripes."""
    found: list[str] = []
    for section, device in ((_PARAM, params), (_OPTIM, optimizer)):
        if device != "nvme":
            continue
        path = account.get(f"{section}.nvme_path")
        if path is None or not str(path):
            raise PlanError(
                f"{section}.device is 'nvme', but there is no {section}.nvme_path: name a directory on a fast drive"
            )
        if Path(path) not in map(Path, found):
            found.append(str(path))
    disk = None if not found else found[0] if len(found) == 1 else tuple(found)
    for section, device in ((_PARAM, params), (_OPTIM, optimizer)):
        if device == "nvme" and len(found) == 1:
            account.say(f"{section}.nvme_path", Kind.PLAN, f"Plan.disk={disk!r}")
        elif device == "nvme":
            words = f"one of the directories in Plan.disk={disk!r}; all states are striped over them, not one state in each"
            account.say(f"{section}.nvme_path", Kind.PLAN, words)
    return disk


def _read_precision(account: _Account) -> torch.dtype:
    brain = [name for name in ("bf16", "bfloat16") if account.get(f"{name}.enabled")]
    half = account.get("fp16.enabled")
    if brain and half:
        raise PlanError(f"{brain[0]}.enabled and fp16.enabled are both true: switch one of them off")
    for name in brain:
        account.say(f"{name}.enabled", Kind.PLAN, "Plan.compute_dtype=torch.bfloat16")
    if brain:
        return torch.bfloat16
    if half:
        account.say("fp16.enabled", Kind.PLAN, "Plan.compute_dtype=torch.float16")
        account.notes.append("fp16: write optimizer.scale(loss).backward(), which scales the loss")
        return torch.float16
    refused = any(account.get(f"{name}.enabled") is False for name in ("bf16", "bfloat16"))
    opened = any(account.is_open(key) for name in ("bf16", "bfloat16", "fp16") for key in (name, f"{name}.enabled"))
    if opened and not refused:
        account.notes.append("precision is 'auto': Plan.compute_dtype=torch.bfloat16, which is unwall's default")
        return torch.bfloat16
    account.notes.append("neither bf16 nor fp16 is switched on: Plan.compute_dtype=torch.float32")
    return torch.float32


def _read_reduction(account: _Account) -> torch.dtype | None:
    name = account.get("communication_data_type")
    dtype = None if name is None else _DTYPES[name]
    account.say("communication_data_type", Kind.PLAN, f"Plan.reduce_dtype={dtype}")
    accumulated = account.get("data_types.grad_accum_dtype")
    if accumulated is not None and _DTYPES[accumulated] is not torch.float32:
        words = "several backward calls always add up in fp32"
        account.say("data_types.grad_accum_dtype", Kind.MISSING, words)
    if account.get("fp32_allreduce"):
        if dtype not in (None, torch.float32):
            raise PlanError(f"fp32_allreduce is true, but communication_data_type is {name!r}: leave one of them out")
        account.say("fp32_allreduce", Kind.PLAN, "Plan.reduce_dtype=torch.float32")
        return torch.float32
    return dtype


def _read_loss_scale(account: _Account, dtype: torch.dtype) -> None:
    if dtype is not torch.float16:
        for path in account.under("fp16"):
            if path in _RULES and path != ("fp16", "enabled"):
                account.say(".".join(path), Kind.NOT_NEEDED, "only for fp16")
        return
    power, window = account.get("fp16.initial_scale_power"), account.get("fp16.loss_scale_window")
    if account.get("fp16.loss_scale"):
        for key in ("fp16.initial_scale_power", "fp16.loss_scale_window"):
            account.say(key, Kind.NOT_NEEDED, "fp16.loss_scale is fixed")
        return
    account.say("fp16.initial_scale_power", Kind.OPTIMIZER, f"optimizer.scaler.scale = 2.0**{power}, once it is built")
    words = f"optimizer.scaler.growth_interval = {window}, once it is built"
    account.say("fp16.loss_scale_window", Kind.OPTIMIZER, words)


def _read_optimizer(account: _Account) -> None:
    name = account.get("optimizer.type")
    plain = name is not None and name.lower() == "adam" and account.get("optimizer.params.adam_w_mode") is False
    ours = name is None or (name.lower() in ("adam", "adamw") and not plain)
    theirs = "Adam" if plain else name
    if ours:
        words = "unwall.AdamW" + (" (DeepSpeed's Adam decays weights as AdamW does)" if name and name.lower() == "adam" else "")
        decays = _path("optimizer.params.weight_decay") in account.leaves
        if not decays and not account.get("optimizer.params.torch_adam"):
            words += " with weight_decay=0.0, DeepSpeed's default (unwall's is 0.01)"
        account.say("optimizer.type", Kind.OPTIMIZER, words)
    elif _in_torch(theirs):
        words = f"unwall.wrap(torch.optim.{theirs}(...)), which refuses an update that is not element by element"
        account.say("optimizer.type", Kind.OPTIMIZER, words)
    else:
        words = "neither in unwall nor in torch.optim; unwall.wrap takes any element-wise torch optimizer"
        account.say("optimizer.type", Kind.MISSING, words)
    for path in account.under("optimizer.params"):
        _say_argument(account, path, ours, theirs)


def _in_torch(name: str | None) -> bool:
    found = getattr(torch.optim, name or "", None)
    return isinstance(found, type) and issubclass(found, torch.optim.Optimizer)


def _say_argument(account: _Account, path: KeyPath, ours: bool, theirs: str | None) -> None:
    """What an argument of the optimizer became."""
    key, name, value = ".".join(path), ".".join(path[2:]), account.leaves[path]
    if name == "max_grad_norm" or "." in "".join(path):
        return
    if name in ("torch_adam", "adam_w_mode"):
        account.say(key, Kind.NOT_NEEDED, "decides which optimizer optimizer.type becomes")
    elif ours and (name, value) in (("bias_correction", False), ("amsgrad", True)):
        account.say(key, Kind.MISSING, "unwall.AdamW corrects the bias and has no amsgrad")
    elif ours and name in ("lr", "betas", "eps", "weight_decay"):
        shown = tuple(value) if isinstance(value, list) else value
        account.say(key, Kind.OPTIMIZER, f"unwall.AdamW(..., {name}={shown!r})")
    elif not ours and _in_torch(theirs):
        account.say(key, Kind.OPTIMIZER, f"torch.optim.{theirs}(..., {name}={value!r})")
    elif not ours:
        account.say(key, Kind.MISSING, f"an argument of {theirs}")


def _read_clipping(account: _Account) -> None:
    limit = account.get("gradient_clipping")
    for key in ("gradient_clipping", "optimizer.params.max_grad_norm"):
        value = account.get(key)
        if value is not None and key != "gradient_clipping" and limit is not None:
            account.say(key, Kind.NOT_NEEDED, "gradient_clipping counts")
        elif value == 0:
            account.say(key, Kind.NOT_NEEDED, "no clipping")
        else:
            account.say(key, Kind.OPTIMIZER, f"unwall.AdamW(..., max_grad_norm={value}), or unwall.wrap's")


def _read_batch(account: _Account) -> None:
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    whole, micro, count = (account.get(name) for name in names)
    if None not in (whole, micro, count) and whole % (micro * count):
        raise PlanError(f"train_batch_size {whole} is no multiple of {' times '.join(names[1:])}, {micro} times {count}")
    if count == 1:
        account.say(names[2], Kind.NOT_NEEDED, "one backward() a step")
    elif count is not None:
        words = f"call backward() {int(count)} times before optimizer.step(), each on the loss divided by {int(count)}"
        account.say(names[2], Kind.SCRIPT, words)
