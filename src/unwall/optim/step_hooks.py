"""Hooks of the user's around a step (``register_step_pre_hook`` and the like) that raise on one rank: the others are told.

torch wraps ``step`` so that hooks run before and after it. What one of them raises is not unwall's, but the other ranks take
their steps meanwhile and wait for this one. Before the step nothing is changed: where no rank has taken it yet all go on
together, otherwise they cannot. After it they can.
"""

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from unwall.schedule.standing import APART
from unwall.shards.control import DivergedError

if TYPE_CHECKING:
    from unwall.optim.sharded import ShardedOptimizer
    from unwall.schedule.backend import AgreementBackend


def hooks_told(step: "Callable[..., Any]") -> "Callable[..., Any]":
    """``step`` with its hooks, as torch makes it, of which the other ranks hear when one of them raises."""

    @functools.wraps(step)
    def without_hooks(optimizer: "ShardedOptimizer", *args: Any, **kwargs: Any) -> Any:
        optimizer.in_hooks = False
        result = step(optimizer, *args, **kwargs)
        optimizer.in_hooks = True
        return result

    hooked = torch.optim.Optimizer.profile_hook_step(without_hooks)

    @functools.wraps(hooked)
    def told(optimizer: "ShardedOptimizer", *args: Any, **kwargs: Any) -> Any:
        optimizer.in_hooks = True
        try:
            return hooked(optimizer, *args, **kwargs)
        except DivergedError:  # all ranks know of it
            raise
        except BaseException as error:
            apart = [each.fail_alone(error) for each in _one_of_each_set(optimizer)] if optimizer.in_hooks else []
            if any(apart):
                error.add_note(APART)
            raise
        finally:
            optimizer.in_hooks = False

    return told


def _one_of_each_set(optimizer: "ShardedOptimizer") -> "list[AgreementBackend]":
    """One model of each set of ranks is enough: whoever waits there in another model hears of it, too."""
    found: dict[int, AgreementBackend] = {}
    for engine in optimizer.engines():
        if engine.ranks.size > 1:
            found.setdefault(id(engine.ranks.control.watch), engine.executor.agreement)
    return list(found.values())
