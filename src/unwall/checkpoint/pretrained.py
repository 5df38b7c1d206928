"""Models of ``transformers`` that never exist whole: built on the meta device, sharded, then loaded from their files."""

import os
import re
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn

from unwall.checkpoint.find_weights import open_weights
from unwall.checkpoint.inventory import inventory
from unwall.runtime.hooks import engine_of
from unwall.runtime.whole import lend
from unwall.shards.dimensions import same_model
from unwall.shards.local import is_distributed


def build_empty(
    path: str | os.PathLike[str], auto_class: Any, dtype: torch.dtype | str | None, overrides: dict[str, Any]
) -> nn.Module:
    """The model that a directory describes, with parameters on meta and buffers that have their values."""
    import transformers

    if not Path(path, "config.json").is_file():
        raise FileNotFoundError(
            f"{os.fspath(path)} has no config.json: give a directory that save_pretrained wrote. A model of the Hugging Face "
            "hub is fetched first, with huggingface_hub.snapshot_download(name), which returns its directory"
        )
    options = {key: overrides.pop(key) for key in ("attn_implementation", "experts_implementation") if key in overrides}
    config, unknown = transformers.AutoConfig.from_pretrained(path, return_unused_kwargs=True, **overrides)
    if unknown:
        raise TypeError(f"{type(config).__name__} has no {', '.join(sorted(unknown))}: overrides are fields of the config")
    if getattr(config, "quantization_config", None) is not None:
        raise ValueError(f"{os.fspath(path)} holds quantised weights, which are not trained: use the weights they were made of")
    kind = auto_class or _class_of(config)
    make = getattr(kind, "from_config", None) or kind._from_config
    with torch.device("meta"):
        model: Any = make(config, dtype=_dtype(path, dtype, config), **options)
    _all_on_meta(model)
    _keep_fp32(model)
    _give_buffers_values(model)
    if model.can_generate() and Path(path, "generation_config.json").is_file():
        model.generation_config = transformers.GenerationConfig.from_pretrained(path)
    model.eval()
    found: nn.Module = model
    return found


def _class_of(config: Any) -> Any:
    """The class that wrote the directory."""
    import transformers

    for name in config.architectures or ():
        found = getattr(transformers, name, None)
        if found is not None:
            return found
    return transformers.AutoModelForCausalLM if not config.is_encoder_decoder else transformers.AutoModelForSeq2SeqLM


def _dtype(path: str | os.PathLike[str], dtype: torch.dtype | str | None, config: Any) -> torch.dtype:
    """What is asked for, what the config says, or what the first weight is in."""
    if dtype is None or dtype == "auto":
        dtype = config.dtype
    if isinstance(dtype, str):
        dtype = getattr(torch, dtype, None)
    if dtype is None:
        kinds = (entry.dtype for entry in open_weights(path).entries.values())
        dtype = next((kind for kind in kinds if kind.is_floating_point), torch.float32)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ValueError(f"dtype is one for weights, such as torch.bfloat16 or 'auto', got {dtype!r}")
    return dtype


def _all_on_meta(model: nn.Module) -> None:
    """``torch.Tensor(n)`` and ``torch.FloatTensor(n)`` know no device context, so some parameters have memory."""
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, param in module._parameters.items():
            if param is None or param.is_meta:
                continue
            if id(param) not in made:  # tied parameters stay tied
                made[id(param)] = nn.Parameter(torch.empty_like(param, device="meta"), param.requires_grad)
            module._parameters[name] = made[id(param)]


def _keep_fp32(model: Any) -> None:
    """Parameters that ``transformers`` keeps in fp32 whatever the model's dtype is."""
    plan = model._get_dtype_plan(model.dtype) if hasattr(model, "_get_dtype_plan") else {}
    patterns = [(re.compile(pattern.replace("*", ".*")), dtype) for pattern, dtype in plan.items()]
    for name, param in model.named_parameters():
        for pattern, dtype in patterns:
            if pattern.search(name):
                param.data = param.data.to(dtype)


def _give_buffers_values(model: Any) -> None:
    """Memory for the buffers, filled by the model's own initialisation, which leaves the parameters alone."""
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                module._buffers[name] = torch.zeros_like(buffer, device="cpu")
    _flag(model)
    model.initialize_weights()


def _flag(model: nn.Module) -> None:
    """Tells ``transformers`` that all parameters have a value: its initialisers leave them alone."""
    for param in model.parameters():
        param._is_hf_initialized = True  # type: ignore[attr-defined]


def refuse_missing(model: nn.Module, path: str | os.PathLike[str], missing: list[str]) -> None:
    """ValueError where a parameter that is spread over tensor ranks is not in the files: nobody would initialise it."""
    held = inventory(model)
    for name in missing:
        if is_distributed(held[name].tensor):
            raise ValueError(
                f"{os.fspath(path)} does not hold {name}, which is spread over tensor ranks: build the model with its values, "
                "call unwall.parallelize and unwall.shard, then unwall.load_weights(model, path, strict=False)"
            )


def initialize_missing(model: nn.Module, path: str | os.PathLike[str], missing: list[str], unexpected: list[str]) -> None:
    """What the files do not hold gets the values that a new model would have, with a warning, as ``from_pretrained`` does."""
    if unexpected:
        warnings.warn(f"{os.fspath(path)} holds what {type(model).__name__} has no use for: {_some(unexpected)}", stacklevel=3)
    if not missing:
        return
    warnings.warn(
        f"{os.fspath(path)} does not hold {_some(missing)}: they are initialised as in a new {type(model).__name__}, and "
        "should be trained",
        stacklevel=3,
    )
    engine, held = engine_of(model), inventory(model)
    assert engine is not None
    mine = [held[name] for name in missing if name in held]  # other names are those of other stages of a pipeline
    absent = [entry for entry in mine if not entry.is_buffer]
    paths = {module: path for path, module in model.named_modules()}
    _flag(model)
    for buffer in model.buffers():
        # They have values, by ``_give_buffers_values`` or from the files.
        buffer._is_hf_initialized = True  # type: ignore[attr-defined]
    for module in dict.fromkeys(entry.owner for entry in absent):
        own = list(module.parameters(recurse=False))
        lacking = [entry for entry in absent if entry.owner is module]
        with lend(engine, own, write=True), torch.no_grad():
            _initialize(model, paths[module], [entry.tensor for entry in lacking])
            for ranks in same_model(engine.ranks, engine.others):  # each has drawn random numbers of its own
                for param in own:
                    ranks.broadcast(param.data)
            for entry in lacking:
                if entry.tensor.isnan().any():
                    raise RuntimeError(
                        f"{os.fspath(path)} does not hold {entry.name}, and {type(model).__name__} does not say how to "
                        "initialise it: build the model in unwall.init, shard it, and call unwall.load_weights(strict=False)"
                    )


def _initialize(model: nn.Module, path: str, params: list[torch.Tensor]) -> None:
    """Gives parameters of the module at ``path`` the values of a new model. Modules around it have a say after it: a head gives
    its layers another deviation than layers have elsewhere."""
    from transformers import PreTrainedModel
    from transformers.initialization import guard_torch_init_functions

    around, parts = [model], path.split(".") if path else []
    for part in parts:
        around.append(around[-1].get_submodule(part))
    for param in params:
        param._is_hf_initialized = False  # type: ignore[attr-defined]
    with guard_torch_init_functions():
        for count in range(len(around), 0, -1):
            nearest: Any = next(module for module in reversed(around[:count]) if isinstance(module, PreTrainedModel))
            nearest._init_weights(around[count - 1])
    for param in params:
        param._is_hf_initialized = True  # type: ignore[attr-defined]


def _some(names: list[str]) -> str:
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return ", ".join(names[:5]) + more
