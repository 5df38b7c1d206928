"""A step that fails on one rank, after others may have taken theirs."""

import functools
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch

from unwall.native import interrupts
from unwall.shards.control import DivergedError
from unwall.tiers.ledger import BudgetError

if TYPE_CHECKING:
    from unwall.optim.sharded import ShardedOptimizer
    from unwall.runtime.engine import Engine

_OWN_FAULTS = (OSError, MemoryError, BudgetError, torch.OutOfMemoryError)
"""What befalls one rank, beside interrupts. Other errors (a value that makes no sense) mostly come to all of them alike."""
_APART = (
    "this was in a step, which the other ranks may have taken: the model is not the same on all ranks any more, and cannot be "
    "used. Start all ranks again from a checkpoint"
)


def told_to_all(step: "Callable[..., Any]") -> "Callable[..., Any]":
    """Sees to it that the other ranks hear of a step that failed here: this rank's part of the model is older than theirs from
    then on, and no later step could mend that. Not of a fault that all ranks have met to give up: see [Note: faults].

    So over several ranks a Ctrl-C waits until the step is taken, whatever that waits for. A second one comes at once."""

    @functools.wraps(step)
    def checked(optimizer: "ShardedOptimizer", closure: Callable[[], Any] | None = None) -> Any:
        engines = [engine for engine in optimizer.engines() if engine.ranks.size > 1]
        if engines and closure is None:
            interrupts.commit()
        try:
            return step(optimizer, closure)
        except BaseException as error:
            own = isinstance(error, _OWN_FAULTS) or not isinstance(error, Exception)
            known = isinstance(error, DivergedError)  # to all ranks
            if closure is None and not known:  # otherwise it may have come out of that
                agreements = [engine.executor.agreement for engine in engines]
                told = [each.fail_for_good(error, _APART) if own else each.fail_alone(error, _APART) for each in agreements]
                if any(told):
                    error.add_note(_APART)
            raise

    return checked


def refuse_inside_backward(engines: "Iterable[Engine]") -> None:
    """RuntimeError where a step comes out of a hook while backward still reads the parameters that it would take away."""
    for engine in engines:
        if engine.backward.running and not all(group.flat_is_home for group in engine.groups):
            raise RuntimeError(
                "optimizer.step() inside backward (from a hook on a parameter): the groups of the model are still being read. "
                "Call step() after backward; unwall.AdamW(..., update_in_backward=True) updates while it runs"
            )
