"""Modules that are inserted into a list: torch tells of every module that is registered, but not of those."""

import functools
from typing import Any

from torch import nn

from unwall.runtime.engine import Engine


def tell_of_inserts(engine: Engine, module: nn.Module) -> None:
    """``insert`` of a list tells that the model changed. See [Note: newcomers] in runtime/newcomers.py."""
    if isinstance(module, nn.ModuleList | nn.Sequential):
        module.__dict__["insert"] = functools.partial(_insert, engine, module)


def _insert(engine: Engine, into: Any, /, *args: Any, **kwargs: Any) -> Any:
    engine.changed = True
    return type(into).insert(into, *args, **kwargs)
