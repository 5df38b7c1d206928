"""What autograd calls when a parameter's gradient is there."""

import weakref
from typing import Protocol

from torch import nn

from unwall.native import interrupts


class Takes(Protocol):
    """Who takes gradients: ``Backward``."""

    def arrived(self, param: nn.Parameter) -> None: ...

    def failed(self, error: BaseException | str) -> None: ...


class Arrived:
    """After autograd has accumulated a parameter's gradient. Held by autograd, out of the garbage collector's sight."""

    comes_last = True
    """Hooks of the user's that come after ``shard`` find the gradient where autograd has put it."""

    def __init__(self, backward: Takes) -> None:
        self._backward = weakref.ref(backward)

    def __call__(self, param: nn.Parameter) -> None:
        backward = self._backward()
        if backward is None:
            return
        try:
            with interrupts.deferred:
                backward.arrived(param)
        except BaseException as error:
            backward.failed(error)
            raise
