"""Copies of modules of a sharded model: what ``copy.deepcopy`` and ``copy.copy`` give.

[Note: plain copies]
A deep copy (PEFT's ``modules_to_save``, ``AveragedModel``, a reference model) is a plain module outside the engine: whole
parameters in the dtype they were given in, on the device, and none of our hooks. Where it is put into the model it is adopted
like any other newcomer. Reading the values is a collective. ``copy.deepcopy`` asks the module's own ``__deepcopy__``; that
makes a shell, a module of the same class with the same attributes but ours, and copies that, so that classes with ways of
their own are copied in those. A module that is reached again on the way finds its shell.

A shallow copy has the parameters of the original, the very same, and our hooks, as in torch. What is bound to the original
stays behind.
"""

import copy
import functools
from types import MethodType
from typing import Any, NoReturn

from torch import nn
from torch.utils.checkpoint import checkpoint

from unwall.runtime.call_edges import refuse_copy
from unwall.shards.local import is_distributed

_OURS = ("unwall.runtime.", "unwall.native.")
_SHELLS = object()
"""Under its id the shells are in the memo of a deep copy."""
_OF_THE_ROOT = "_is_accelerate_prepared"
_CHECKPOINTING = "_gradient_checkpointing_func"


def copy_plainly(module: nn.Module) -> None:
    """From now on ``copy.deepcopy`` and ``copy.copy`` of this module work. See [Note: plain copies]."""
    module.__dict__["__deepcopy__"] = functools.partial(_deep, module)
    module.__dict__["__getstate__"] = functools.partial(_shallow, module)


def _deep(module: nn.Module, memo: dict[int, Any]) -> nn.Module:
    shells: dict[int, nn.Module] = memo.setdefault(id(_SHELLS), {})
    if id(module) not in shells:
        shells[id(module)] = _shell(module)
    return copy.deepcopy(shells[id(module)], memo)


def _shell(module: nn.Module) -> nn.Module:
    """The module as it was before ``shard``, but for its parameters."""
    if any(param is not None and is_distributed(param) for param in module._parameters.values()):
        refuse_copy()
    state = {name: _hooks_of_others(value) if name.endswith("_hooks") else value for name, value in module.__dict__.items()}
    for name in [name for name, value in state.items() if _is_ours(value)]:
        del state[name]
    state.pop(_OF_THE_ROOT, None)
    state |= _unwrapped(module)
    state["_parameters"] = dict(module._parameters)
    kept = {*state["_forward_hooks"], *state["_forward_pre_hooks"]}
    for name in ("_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_forward_pre_hooks_with_kwargs"):
        state[name] = type(state[name])((key, flag) for key, flag in state[name].items() if key in kept)
    shell = type(module).__new__(type(module))
    shell.__dict__.update(state)
    return shell


def _hooks_of_others(hooks: Any) -> Any:
    if not isinstance(hooks, dict):
        return hooks
    return type(hooks)((key, hook) for key, hook in hooks.items() if not _is_ours(hook))


def _unwrapped(module: nn.Module) -> dict[str, Any]:
    """What we have put something around, without that."""
    found: dict[str, Any] = {}
    if _is_ours(module.__dict__.get(_CHECKPOINTING)):
        found[_CHECKPOINTING] = functools.partial(checkpoint, use_reentrant=False)
    forward = module.__dict__.get("forward")
    if forward is not None and _is_ours(forward):
        while _is_ours(forward) and hasattr(forward, "__wrapped__"):
            forward = forward.__wrapped__
        of_the_class = isinstance(forward, MethodType) and forward.__func__ is type(module).forward
        if not of_the_class:
            found["forward"] = forward
    return found


def _is_ours(value: Any) -> bool:
    """Whether something in a module is a hook or a function of ours, or a mapping that tells us of something."""
    while isinstance(value, functools.partial) or type(value).__name__ == "_WrappedHook":
        value = value.func if isinstance(value, functools.partial) else value.hook
    if isinstance(value, MethodType):
        value = value.__self__
    where = getattr(value, "__globals__", None)  # functools.wraps changes what a function says of itself
    return str(type(value).__module__ if where is None else where.get("__name__")).startswith(_OURS)


def _shallow(module: nn.Module) -> Any:
    """``__getstate__``: for ``copy.copy``. ``pickle`` finds the hooks, which refuse it."""
    state = type(module).__getstate__(module)
    if not isinstance(state, dict):
        return state
    bound = [name for name, value in state.items() if callable(value) and _is_ours(value) and name != "zero_grad"]
    kept = {name: value for name, value in state.items() if name not in bound}
    return {**kept, **_unwrapped(module), "_apply": _refuse_conversion}


def _refuse_conversion(*_: Any, **__: Any) -> NoReturn:
    raise RuntimeError(
        "a shallow copy of a module of a sharded model has the parameters of the original, which cannot be converted or moved: "
        "copy.deepcopy gives a module with parameters of its own"
    )
