"""Readers of the keys that decide something together. Each says in the account what its keys became."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from unwall.deepspeed.account import Account, path_of
from unwall.deepspeed.keys import DTYPES, OPTIM, PARAM, RULES, ZERO_SECTION, KeyPath, Outcome
from unwall.plans import Plan, PlanError


def read_stage(account: Account) -> int:
    key = f"{ZERO_SECTION}.stage"
    legacy, stage = account.get(ZERO_SECTION), account.get(key)
    if isinstance(legacy, bool):
        account.say(ZERO_SECTION, Outcome.PLAN, f"Plan.stage={int(legacy)} (in old files true meant stage 1)")
        return int(legacy)
    account.say(ZERO_SECTION, Outcome.NOT_NEEDED, "empty")
    if stage is not None:
        account.say(key, Outcome.PLAN, f"Plan.stage={int(stage)}")
        return int(stage)
    if account.is_open(key) or account.is_open(ZERO_SECTION):
        return Plan().stage
    account.notes.append(f"no {key}: Plan.stage=0, which is DeepSpeed's default")
    return 0


_TIERS = {"none": "device", "cpu": "host", "nvme": "disk"}


def read_places(account: Account, stage: int) -> dict[str, Any]:
    """``params``, ``optimizer`` and ``disk`` of the plan."""
    params = _offloaded(account, PARAM, ("cpu_offload_param", "cpu_offload_params"))
    optimizer = _offloaded(account, OPTIM, ("cpu_offload",))
    if params in ("cpu", "nvme") and stage < 3:
        raise PlanError(
            f"{PARAM}.device is {params!r} with {ZERO_SECTION}.stage {stage}: parameters are offloaded at stage 3 only; "
            f"write stage 3 or leave {PARAM} out"
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
    account.say(f"{PARAM}.device", Outcome.PLAN, words)
    account.say(f"{OPTIM}.device", Outcome.PLAN, f"Plan.optimizer={fields['optimizer']!r}")
    return {**fields, "disk": _read_disk(account, params, optimizer)}


def _offloaded(account: Account, section: str, old_names: tuple[str, ...]) -> str | None:
    """The DeepSpeed device of a state, by its new or old name; None where nothing is said."""
    device: str | None = account.get(f"{section}.device")
    if device is None and account.under(section) and not account.is_open(f"{section}.device"):
        account.notes.append(f"{section} has no device: nothing is offloaded, which is DeepSpeed's default")
    field = "params" if section == PARAM else "optimizer"
    for name in old_names:
        key = f"{ZERO_SECTION}.{name}"
        if account.get(key) is not True:
            continue
        if device not in (None, "cpu"):
            raise PlanError(f"{key} is true, but {section}.device is {device!r}: leave one of them out")
        account.say(key, Outcome.PLAN, f"Plan.{field}='host' (an old name of {section}.device='cpu')")
        device = "cpu"
    return device


def _read_disk(account: Account, params: str | None, optimizer: str | None) -> Any:
    """The directories: two different ones become two stripes."""
    found: list[str] = []
    for section, device in ((PARAM, params), (OPTIM, optimizer)):
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
    for section, device in ((PARAM, params), (OPTIM, optimizer)):
        if device == "nvme" and len(found) == 1:
            account.say(f"{section}.nvme_path", Outcome.PLAN, f"Plan.disk={disk!r}")
        elif device == "nvme":
            words = f"one of the directories in Plan.disk={disk!r}; all states are striped over them, not one state in each"
            account.say(f"{section}.nvme_path", Outcome.PLAN, words)
    return disk


def read_precision(account: Account) -> torch.dtype:
    brain = [name for name in ("bf16", "bfloat16") if account.get(f"{name}.enabled")]
    half = account.get("fp16.enabled")
    if brain and half:
        raise PlanError(f"{brain[0]}.enabled and fp16.enabled are both true: switch one of them off")
    for name in brain:
        account.say(f"{name}.enabled", Outcome.PLAN, "Plan.compute_dtype=torch.bfloat16")
    if brain:
        return torch.bfloat16
    if half:
        account.say("fp16.enabled", Outcome.PLAN, "Plan.compute_dtype=torch.float16")
        account.notes.append("fp16: write optimizer.scale(loss).backward(), which scales the loss")
        return torch.float16
    refused = any(account.get(f"{name}.enabled") is False for name in ("bf16", "bfloat16"))
    opened = any(account.is_open(key) for name in ("bf16", "bfloat16", "fp16") for key in (name, f"{name}.enabled"))
    if opened and not refused:
        account.notes.append("precision is 'auto': Plan.compute_dtype=torch.bfloat16, which is unwall's default")
        return torch.bfloat16
    account.notes.append("neither bf16 nor fp16 is switched on: Plan.compute_dtype=torch.float32")
    return torch.float32


def read_reduction(account: Account) -> torch.dtype | None:
    name = account.get("communication_data_type")
    dtype = None if name is None else DTYPES[name]
    account.say("communication_data_type", Outcome.PLAN, f"Plan.reduce_dtype={dtype}")
    accumulated = account.get("data_types.grad_accum_dtype")
    if accumulated is not None and DTYPES[accumulated] is not torch.float32:
        words = "several backward calls always add up in fp32"
        account.say("data_types.grad_accum_dtype", Outcome.MISSING, words)
    if account.get("fp32_allreduce"):
        if dtype not in (None, torch.float32):
            raise PlanError(f"fp32_allreduce is true, but communication_data_type is {name!r}: leave one of them out")
        account.say("fp32_allreduce", Outcome.PLAN, "Plan.reduce_dtype=torch.float32")
        return torch.float32
    return dtype


def read_compression(account: Account, stage: int, dtype: torch.dtype, reduce_dtype: torch.dtype | None) -> dict[str, Any]:
    """``gather_dtype``, ``reduce_dtype``, ``reduce_feedback``, ``replica``: what ZeRO++ does on the way between ranks."""
    fields: dict[str, Any] = {"reduce_dtype": reduce_dtype}
    weights, gradients = (f"{ZERO_SECTION}.zero_quantized_{name}" for name in ("weights", "gradients"))
    wide = "only what computes in bf16 or fp16 is compressed on its way"
    if account.get(weights):
        works = dtype is not torch.float32 and stage > 0
        words = wide if stage > 0 else "stage 0 gathers no parameters"
        account.say(weights, *((Outcome.PLAN, "Plan.gather_dtype='int8'") if works else (Outcome.MISSING, words)))
        fields["gather_dtype"] = "int8" if works else None
    if account.get(gradients) and dtype is torch.float32:
        account.say(gradients, Outcome.MISSING, wide)
    elif account.get(gradients):
        words = "Plan.reduce_dtype='int4' ('int8' sends twice as much, with a sixteenth of the noise)"
        account.say(gradients, Outcome.PLAN, words)
        fields["reduce_dtype"] = "int4"
        if account.under(f"{ZERO_SECTION}.zeropp_loco_param") and dtype is torch.bfloat16:
            fields["reduce_feedback"] = True
            account.notes.append("zeropp_loco_param: Plan.reduce_feedback=True, which is error feedback as well")
    return fields | _read_replica(account, stage)


def _read_replica(account: Account, stage: int) -> dict[str, Any]:
    path = f"{ZERO_SECTION}.zero_hpz_partition_size"
    ranks = account.get(path)
    if not isinstance(ranks, int) or ranks <= 1:
        return {}
    if stage != 3:
        account.say(path, Outcome.MISSING, f"stage {stage} keeps parameters whole: there is nothing to gather again")
        return {}
    account.say(path, Outcome.PLAN, f"Plan.replica='node', node_ranks={ranks}")
    return {"replica": "node", "node_ranks": ranks}


def read_attention(account: Account, config: Any) -> Any:
    """The pattern that the ``sparse_attention`` section asks for. None without one."""
    if not isinstance(config, Mapping) or not config or config.get("mode") == "dense":
        for path in account.under("sparse_attention"):
            account.say(".".join(path), Outcome.NOT_NEEDED, "dense attention is what a model has")
        return None
    from unwall.sparse.patterns import from_deepspeed  # takes a while to import

    try:
        return from_deepspeed(config)
    except ValueError as error:
        raise PlanError(str(error)) from error


def read_loss_scale(account: Account, dtype: torch.dtype) -> None:
    if dtype is not torch.float16:
        for path in account.under("fp16"):
            if path in RULES and path != ("fp16", "enabled"):
                account.say(".".join(path), Outcome.NOT_NEEDED, "only for fp16")
        return
    power, window = account.get("fp16.initial_scale_power"), account.get("fp16.loss_scale_window")
    if account.get("fp16.loss_scale"):
        for key in ("fp16.initial_scale_power", "fp16.loss_scale_window"):
            account.say(key, Outcome.NOT_NEEDED, "fp16.loss_scale is fixed")
        return
    account.say("fp16.initial_scale_power", Outcome.OPTIMIZER, f"optimizer.scaler.scale = 2.0**{power}, once it is built")
    words = f"optimizer.scaler.growth_interval = {window}, once it is built"
    account.say("fp16.loss_scale_window", Outcome.OPTIMIZER, words)


def read_optimizer(account: Account) -> None:
    name = account.get("optimizer.type")
    plain = name is not None and name.lower() == "adam" and account.get("optimizer.params.adam_w_mode") is False
    ours = name is None or (name.lower() in ("adam", "adamw") and not plain)
    theirs = "Adam" if plain else name
    if ours:
        words = "unwall.AdamW" + (" (DeepSpeed's Adam decays weights as AdamW does)" if name and name.lower() == "adam" else "")
        decays = path_of("optimizer.params.weight_decay") in account.leaves
        if not decays and not account.get("optimizer.params.torch_adam"):
            words += " with weight_decay=0.0, DeepSpeed's default (unwall's is 0.01)"
        account.say("optimizer.type", Outcome.OPTIMIZER, words)
    elif _in_torch(theirs):
        words = f"unwall.wrap(torch.optim.{theirs}(...)), which refuses an update that is not element by element"
        account.say("optimizer.type", Outcome.OPTIMIZER, words)
    else:
        words = "neither in unwall nor in torch.optim; unwall.wrap takes any element-wise torch optimizer"
        if name is not None and name.lower() in _ONE_BIT:
            words = (
                "needs the whole momentum on every rank, which stages 2 and 3 cut, and fixes the variance after a warm-up; "
                "unwall.AdamW with Plan(reduce_dtype='int4') sends a quarter of bf16 and leaves Adam as it is"
            )
        account.say("optimizer.type", Outcome.MISSING, words)
    for path in account.under("optimizer.params"):
        _say_argument(account, path, ours, theirs)


_ONE_BIT = ("onebitadam", "onebitlamb", "zerooneadam")


def _in_torch(name: str | None) -> bool:
    found = getattr(torch.optim, name or "", None)
    return isinstance(found, type) and issubclass(found, torch.optim.Optimizer)


def _say_argument(account: Account, path: KeyPath, ours: bool, theirs: str | None) -> None:
    """What an argument of the optimizer became."""
    key, name, value = ".".join(path), ".".join(path[2:]), account.leaves[path]
    if name == "max_grad_norm" or "." in "".join(path):
        return
    if name in ("torch_adam", "adam_w_mode"):
        account.say(key, Outcome.NOT_NEEDED, "decides which optimizer optimizer.type becomes")
    elif ours and (name, value) in (("bias_correction", False), ("amsgrad", True)):
        account.say(key, Outcome.MISSING, "unwall.AdamW corrects the bias and has no amsgrad")
    elif ours and name in ("lr", "betas", "eps", "weight_decay"):
        shown = tuple(value) if isinstance(value, list) else value
        account.say(key, Outcome.OPTIMIZER, f"unwall.AdamW(..., {name}={shown!r})")
    elif not ours and _in_torch(theirs):
        account.say(key, Outcome.OPTIMIZER, f"torch.optim.{theirs}(..., {name}={value!r})")
    elif not ours:
        account.say(key, Outcome.MISSING, f"an argument of {theirs}")


def read_clipping(account: Account) -> None:
    limit = account.get("gradient_clipping")
    for key in ("gradient_clipping", "optimizer.params.max_grad_norm"):
        value = account.get(key)
        if value is not None and key != "gradient_clipping" and limit is not None:
            account.say(key, Outcome.NOT_NEEDED, "gradient_clipping counts")
        elif value == 0:
            account.say(key, Outcome.NOT_NEEDED, "no clipping")
        else:
            account.say(key, Outcome.OPTIMIZER, f"unwall.AdamW(..., max_grad_norm={value}), or unwall.wrap's")


def read_batch(account: Account) -> None:
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    whole, micro, count = (account.get(name) for name in names)
    if None not in (whole, micro, count) and whole % (micro * count):
        raise PlanError(f"train_batch_size {whole} is no multiple of {' times '.join(names[1:])}, {micro} times {count}")
    if count == 1:
        account.say(names[2], Outcome.NOT_NEEDED, "one backward() per step")
    elif count is not None:
        words = f"call backward() {int(count)} times before optimizer.step(), each on the loss divided by {int(count)}"
        account.say(names[2], Outcome.SCRIPT, words)
