"""PyTorch's default hooks for saved tensors: per thread a stack of pairs, of which autograd applies the top one."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

Look = Callable[[bool], Any]
push: Callable[[Callable[[Any], Any], Callable[[Any], Any]], None] = torch._C._autograd._push_saved_tensors_default_hooks
pop: Callable[[], None] = torch._C._autograd._pop_saved_tensors_default_hooks
_top: Look | None = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)


def visible() -> bool:
    """Whether this PyTorch tells which pair is on top (the function is private). Without it pairs do not compose."""
    return _top is not None


def top() -> Any:
    """The pair that autograd applies now, if there is one, as far as it can be seen."""
    return None if _top is None else _top(True)


def look() -> Look | None:
    """What tells which pair is on top when it is called with True, for those who ask often. See ``visible``."""
    return _top


@contextmanager
def hidden() -> Iterator[None]:
    """No pair is there meanwhile.

    For what begins here and outlives the call: a collective in flight keeps the thread's hooks, out of the garbage collector's
    sight. A gather that was begun for another rank may never be waited for. With the hooks it would keep what they belong to:
    this model and so itself, the module that a checkpoint runs and its inputs.
    """
    pairs: list[Any] = []
    while (pair := top()) is not None:
        pairs.append(pair)
        pop()
    try:
        yield
    finally:
        for pack, unpack in reversed(pairs):
            push(pack, unpack)
