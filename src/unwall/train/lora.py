"""LoRA through ``peft``: the base is frozen and streamed from wherever it lives; adapters are trained beside it."""

import random
from pathlib import Path
from typing import Any

import torch
from torch import nn

from unwall.api import full_params
from unwall.train.errors import TrainError, missing
from unwall.train.options import Options

PREFIX = "base_model.model."


def add_adapters(model: nn.Module, options: Options) -> nn.Module:
    """The model of ``peft`` around a base, which is frozen. Sharded or on the meta device."""
    try:
        import peft
    except ImportError:
        raise missing("peft", "--lora") from None
    targets: Any = options.lora_targets
    if targets != "all-linear":
        targets = _split(targets)
        _check_targets(model, targets)
    config = peft.LoraConfig(
        r=options.lora_rank,
        lora_alpha=2 * options.lora_rank if options.lora_alpha is None else options.lora_alpha,  # type: ignore[arg-type]
        lora_dropout=options.lora_dropout,
        target_modules=targets,
        task_type="CAUSAL_LM",
    )
    state, torch_state = random.getstate(), torch.get_rng_state()
    torch.manual_seed(options.seed + 1)
    try:
        found: nn.Module = peft.get_peft_model(model, config)
    except ValueError as error:
        raise TrainError(f"--lora-targets {options.lora_targets}: {(str(error).strip().splitlines() or [''])[0]}") from None
    finally:
        random.setstate(state)
        torch.set_rng_state(torch_state)
    return found


def adapts_head(base: Any, options: Options) -> bool:
    """Whether the head of a language model gets an adapter: only where it is named."""
    head = base.get_output_embeddings()
    names = [name for name, module in base.named_modules() if module is head]
    return options.lora and any(_meant(name, target) for name in names for target in _split(options.lora_targets))


def _split(targets: str) -> list[str]:
    return [name.strip() for name in targets.split(",") if name.strip()]


def _meant(name: str, target: str) -> bool:
    """Whether ``peft`` takes a target for this module."""
    return name == target or name.endswith(f".{target}")


def _check_targets(model: nn.Module, targets: list[str]) -> None:
    """TrainError for a name that means no module: ``peft`` only minds where all of them do."""
    names = [name for name, _ in model.named_modules()]
    for target in targets:
        if not any(_meant(name, target) for name in names):
            known = sorted({name.rpartition(".")[2] for name, module in model.named_modules() if isinstance(module, nn.Linear)})
            raise TrainError(f"--lora-targets: no module is called {target}; linear ones are {', '.join(known)}")


def adapters(model: nn.Module) -> dict[str, nn.Parameter]:
    """What is trained, by name."""
    return {name: param for name, param in model.named_parameters() if param.requires_grad}


def adapter_values(model: nn.Module) -> dict[str, torch.Tensor]:
    """Their values in full precision. All ranks call it together."""
    found = {}
    for name, param in adapters(model).items():
        with full_params(param):
            found[name] = param.detach().to("cpu", copy=True)
    return found


def write_adapter_values(model: nn.Module, values: dict[str, torch.Tensor]) -> None:
    """The inverse. All ranks together; each has all values."""
    for name, param in adapters(model).items():
        with full_params(param, write=True), torch.no_grad():
            param.copy_(values[name])


def write_adapter_files(model: nn.Module, folder: Path, base: str, rank: int) -> None:
    """``adapter_config.json`` and ``adapter_model.safetensors``, as ``peft`` writes them. All ranks call it together."""
    from safetensors.torch import save_file

    values = adapter_values(model)
    if rank != 0:
        return
    known: Any = model.peft_config
    config = known["default"]
    config.base_model_name_or_path = str(Path(base).resolve())
    config.inference_mode = True
    config.save_pretrained(str(folder))
    config.inference_mode = False
    named = {name.replace(".default.", "."): value.contiguous() for name, value in values.items()}
    partial = folder / "adapter_model.partial"
    save_file(named, partial, metadata={"format": "pt"})
    partial.replace(folder / "adapter_model.safetensors")
