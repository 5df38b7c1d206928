"""A step that fails on one rank, after others may have taken theirs."""

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from unwall.tiers.ledger import BudgetError

if TYPE_CHECKING:
    from unwall.optim.sharded import ShardedOptimizer

_OWN_FAULTS = (OSError, MemoryError, BudgetError, torch.OutOfMemoryError, KeyboardInterrupt)
"""What befalls one rank. Other errors (a value that makes no sense) come to all of them alike."""


def told_to_all(step: "Callable[..., Any]") -> "Callable[..., Any]":
    """Sees to it that the other ranks hear of a step that failed here: this rank's part of the model is older than theirs from
    then on, and no later step could mend that. Not of a fault that all ranks have met to give up: see [Note: faults]."""

    @functools.wraps(step)
    def checked(optimizer: "ShardedOptimizer", closure: Callable[[], Any] | None = None) -> Any:
        try:
            return step(optimizer, closure)
        except _OWN_FAULTS as error:
            if closure is None:  # otherwise it may have come out of that
                for engine in optimizer.engines():
                    engine.executor.agreement.fail_for_good(error)
            raise

    return checked
