"""What the user calls of an optimizer, as a whole: no interrupt and no other thread comes between."""

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

import torch

from unwall.native import interrupts

if TYPE_CHECKING:
    from unwall.optim.sharded import ShardedOptimizer
    from unwall.runtime.engine import Engine

P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S", bound="ShardedOptimizer")


def alone(method: "Callable[Concatenate[S, P], R]") -> "Callable[Concatenate[S, P], R]":
    """A method of an optimizer that has the turn of all its models. See [Note: turns] in runtime/turns.py."""

    @functools.wraps(method)
    def whole(optimizer: S, /, *args: P.args, **kwargs: P.kwargs) -> R:
        with interrupts.deferred, _turns(optimizer.engines(), method.__name__):
            return method(optimizer, *args, **kwargs)

    return whole


def alone_after_closure(step: "Callable[[S, Callable[[], Any] | None], Any]") -> "Callable[..., Any]":
    """The same for ``step``, whose closure is the user's and runs before."""

    @functools.wraps(step)
    def whole(optimizer: S, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        interrupts.install()  # where someone has put another handler there since the forward
        with interrupts.deferred, _turns(optimizer.engines(), "step"):
            step(optimizer, None)
        return loss

    return whole


def _turns(engines: "Sequence[Engine]", what: str) -> AbstractContextManager[Any]:
    if len(engines) == 1:
        return engines[0].turn.held(what)
    taken = ExitStack()
    try:
        for engine in sorted(engines, key=id):  # two optimizers over the same models ask in the same order
            taken.enter_context(engine.turn.held(what))
    except BaseException:
        taken.close()
        raise
    return taken
