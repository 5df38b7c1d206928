"""What autograd calls when a parameter's gradient is there."""

import weakref
from threading import get_ident
from typing import TYPE_CHECKING, Protocol

from torch import nn

from unwall.native import interrupts

if TYPE_CHECKING:
    from unwall.runtime.arrivals import Note


class Takes(Protocol):
    """Who takes gradients: ``Arrivals``."""

    noting: "dict[int, Note]"

    def note_arrival(self, param: nn.Parameter) -> bool: ...

    def arrived(self, param: nn.Parameter) -> None: ...

    def failed(self, error: BaseException | str) -> None: ...


class Arrived:
    """After autograd has accumulated a parameter's gradient. Held by autograd, out of the garbage collector's sight."""

    comes_last = True
    """Hooks of the user's that come after ``shard`` find the gradient where autograd has put it."""

    def __init__(self, arrivals: Takes) -> None:
        self._arrivals = weakref.ref(arrivals)

    def __call__(self, param: nn.Parameter) -> None:
        arrivals = self._arrivals()
        if arrivals is None:
            return
        try:
            if get_ident() != interrupts.main_ident and id(param) in arrivals.noting and arrivals.note_arrival(param):
                return  # no signal comes here
            with interrupts.deferred:
                if id(param) not in arrivals.noting or not arrivals.note_arrival(param):
                    arrivals.arrived(param)
        except BaseException as error:
            arrivals.failed(error)
            raise
