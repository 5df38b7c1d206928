"""``save_pretrained`` of a sharded transformers model: whole files, in the dtype that the model was given in."""

import functools
from typing import Any

import torch
from torch import nn

from unwall.runtime.engine import Engine
from unwall.runtime.whole import dtypes_of


def write_given_dtype(engine: Engine, modules: list[nn.Module]) -> None:
    """``state_dict`` gives fp32 where there is a master; the file and its config say what dtype the model has."""
    for module in modules:
        if callable(getattr(type(module), "save_pretrained", None)):
            module.__dict__["save_pretrained"] = functools.partial(_save, engine, module)


def _save(engine: Engine, module: nn.Module, directory: Any, *args: Any, **options: Any) -> Any:
    """All ranks call it together; rank 0 writes."""
    state_dict = options.pop("state_dict", None)
    state_dict = module.state_dict() if state_dict is None else state_dict
    given = {name: dtypes_of(engine, param)[0] for name, param in _sharded(engine, module)}
    if engine.ranks.rank and getattr(module, "peft_config", None):
        # PEFT looks up what it saves on every rank, though rank 0 alone writes it.
        shapes = ((name, param.shape) for name, param in _sharded(engine, module))
        state_dict = {name: torch.empty((), dtype=given[name]).expand(shape) for name, shape in shapes} | state_dict
    cast: dict[int, torch.Tensor] = {}
    for name, value in state_dict.items():
        if name in given and value.dtype is not given[name]:
            if id(value) not in cast:  # tied parameters stay tied
                cast[id(value)] = value.to(given[name])
            state_dict[name] = cast[id(value)]
    if not args:
        options["is_main_process"] = options.get("is_main_process", True) and engine.ranks.rank == 0
    save = type(module).save_pretrained  # type: ignore[attr-defined]
    return save(module, directory, *args, state_dict=state_dict, **options)


def _sharded(engine: Engine, module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    found = module.named_parameters(remove_duplicate=False)
    return [(name, param) for name, param in found if id(param) in engine.places]
