"""The optimizer that ``wrap`` was given, in the hands of those who knew it before: schedulers, hooks, loops.

[Note: one optimizer with two names]
``scheduler = StepLR(inner, 1)``, then ``optimizer = unwall.wrap(inner)``: whoever still has the inner optimizer means the one
that trains. So both have the same param groups and the same hooks on steps, and what is called on the inner one is done by the
other.
"""

import types
import weakref
from typing import Any

import torch

CALLS = ("step", "zero_grad", "add_param_group", "state_dict", "load_state_dict")
"""What is passed on."""
HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")


def stand_for(outer: torch.optim.Optimizer, inner: torch.optim.Optimizer) -> None:
    """From now on what is done to ``inner`` is done to ``outer``. See [Note: one optimizer with two names]."""
    for name in HOOKS:
        getattr(outer, name).update(getattr(inner, name))
        setattr(inner, name, getattr(outer, name))
    known = weakref.ref(outer)
    for name in CALLS:
        inner.__dict__[name] = types.MethodType(_passed_on(known, name), inner)  # schedulers want a bound method
    inner._unwall_inner = True  # type: ignore[attr-defined]
    share_options(outer, inner)


def share_options(outer: torch.optim.Optimizer, inner: torch.optim.Optimizer) -> None:
    """Schedulers of either change the options that count. Again where the list has become another one."""
    inner.param_groups = outer.param_groups


def _passed_on(known: "weakref.ref[torch.optim.Optimizer]", name: str) -> Any:
    def call(inner: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        outer = known()
        if outer is None:
            raise RuntimeError(
                f"{type(inner).__name__}.{name}: unwall.wrap was called with it, and what that gave is gone. Keep that, and "
                "use it instead"
            )
        return getattr(outer, name)(*args, **kwargs)

    call._wrapped_by_lr_sched = True  # type: ignore[attr-defined]  # what a scheduler looks for: the step is counted, see wrap.py
    return call
