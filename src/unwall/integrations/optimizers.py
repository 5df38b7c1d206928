"""Optimizers of a sharded model as other trainers ask for them."""

import functools
import inspect
from typing import Any

import torch

from unwall.optim.adamw import AdamW
from unwall.optim.sharded import ShardedOptimizer
from unwall.optim.wrap import wrap

_KERNELS = ("fused", "foreach", "capturable", "differentiable")
"""Options of torch's optimizers that say how to compute, not what."""
_OURS = ("lr", "betas", "eps", "weight_decay")


def innermost(optimizer: Any) -> ShardedOptimizer:
    """The optimizer of a sharded model inside whatever a trainer has put around it. TypeError where there is none."""
    found = optimizer
    while True:
        inner = getattr(found, "optimizer", None) or getattr(found, "_optimizer", None)
        if isinstance(found, ShardedOptimizer) and not isinstance(inner, ShardedOptimizer):
            return found
        if inner is None or inner is found:
            raise TypeError(
                f"{type(optimizer).__name__} is not an optimizer of a sharded model: use unwall.AdamW(model.parameters(), ...) "
                "or unwall.wrap(optimizer), after unwall.shard"
            )
        found = inner  # Lightning's wrapper is of the class of what it wraps, but what is set on it never arrives there


def call_inside(wrapper: Any, kept: type) -> None:
    """Methods of a wrapper that is of its optimizer's class become those of the optimizer itself; not those of ``kept``."""
    inner = innermost(wrapper)
    for name in dir(inner):
        if not name.startswith("_") and not hasattr(kept, name) and inspect.isfunction(getattr(type(inner), name, None)):
            setattr(wrapper, name, getattr(inner, name))


def build(kind: type[torch.optim.Optimizer], groups: Any, options: dict[str, Any]) -> ShardedOptimizer:
    """An optimizer class of torch over param groups of a sharded model: ``unwall.AdamW``, or ``unwall.wrap`` around the class.

    ValueError where the class cannot update shards, because its update is not element-wise.
    """
    wanted = {name: value for name, value in options.items() if name not in _KERNELS}
    if issubclass(kind, ShardedOptimizer):
        made: ShardedOptimizer = kind(groups, **wanted)
        return made
    more = {name: value for name, value in wanted.items() if name not in _OURS and value not in (False, None)}
    if kind is torch.optim.AdamW and not more and not isinstance(wanted.get("lr"), torch.Tensor):
        return AdamW(groups, **{name: value for name, value in wanted.items() if name in _OURS})
    return wrap(kind(groups, **wanted))


def sharded_class(kind: type[torch.optim.Optimizer]) -> type[torch.optim.Optimizer]:
    """A class in the place of ``kind`` whose instances are what ``build`` gives: for trainers that insist on a class."""

    class Sharded(torch.optim.Optimizer):
        def __new__(cls, groups: Any, **options: Any) -> Any:
            return build(kind, groups, options)

    return Sharded


def rebuild(optimizer: torch.optim.Optimizer) -> ShardedOptimizer:
    """The same optimizer for a model that was sharded after it was built. ValueError where it has taken a step by then."""
    if optimizer.state:
        raise ValueError(
            f"{type(optimizer).__name__} has states of a model that is not sharded yet: build the optimizer anew and load the "
            "states afterwards"
        )
    groups = [dict(group) for group in optimizer.param_groups]
    given = {name for group in groups for name in group if name not in (*_OURS, *_KERNELS, "params", "initial_lr")}
    changed = {name for name in given if any(group.get(name) not in (False, None) for group in groups)}
    if type(optimizer) is torch.optim.AdamW and changed <= {"decoupled_weight_decay"}:
        kept = [{k: v for k, v in group.items() if k in (*_OURS, "params", "initial_lr")} for group in groups]
        return AdamW(kept)
    return wrap(optimizer)


def repoint(scheduler: Any, given: torch.optim.Optimizer, ours: ShardedOptimizer) -> None:
    """A scheduler that was built around ``given``, and those inside of it, set the learning rates of ``ours`` from now on."""
    for inner in getattr(scheduler, "_schedulers", ()):
        repoint(inner, given, ours)
    if getattr(scheduler, "optimizer", None) is not given:
        return
    scheduler.optimizer = ours
    if not hasattr(ours.step, "_wrapped_by_lr_sched"):
        ours.step = _counted(ours)  # type: ignore[method-assign]


def _counted(optimizer: Any) -> Any:
    """A step that says that it was taken, which schedulers look at before their own first one."""
    step = optimizer.step

    @functools.wraps(step)
    def counted(*args: Any, **options: Any) -> Any:
        optimizer._opt_called = True
        return step(*args, **options)

    counted._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    return counted
