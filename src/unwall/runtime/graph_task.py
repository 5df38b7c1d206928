"""Backwards, as autograd counts them, and whether they still run.

[Note: graph tasks]
Each call of backward is a graph task of autograd's. It owns the callbacks that were queued for its end: where it ends well it
calls them, where it ends with an exception it calls nothing, and they go with it. So a callback that nobody else refers to
tells both. Whoever wants to know whether a backward is over, on whatever thread, asks that; nobody follows the stack of another
thread, which changes under the eyes of whoever looks.
"""

import weakref
from collections.abc import Callable

import torch


class _Ending:
    """What autograd calls when a graph task ends well. It holds the only reference."""

    __slots__ = ("__weakref__", "_call", "_number", "called")

    def __init__(self, call: Callable[[int], None], number: int) -> None:
        self._call = call
        self._number = number
        self.called = False
        """Also where that raised: the traceback may refer to this object for long."""

    def __call__(self) -> None:
        try:
            self._call(self._number)
        finally:
            self.called = True


class GraphTask:
    """The graph task that runs on this thread now. ``at_end`` is called, with its number, where it ends well."""

    __slots__ = ("_ending", "number")

    def __init__(self, number: int, at_end: Callable[[int], None]) -> None:
        self.number = number
        ending = _Ending(at_end, number)
        torch.autograd.Variable._execution_engine.queue_callback(ending)
        self._ending = weakref.ref(ending)

    @property
    def runs(self) -> bool:
        """Whether it has not ended, in whatever way. See [Note: graph tasks]."""
        ending = self._ending()
        return ending is not None and not ending.called


class GraphTasks(dict[int, GraphTask]):
    """Those that have come to a model, by number."""

    @property
    def run(self) -> bool:
        """Whether any of them does."""
        return any(task.runs for task in list(self.values()))

    def forget_ended(self) -> bool:
        """Of one that ended with an exception nobody tells. False where all run."""
        ended = [number for number, task in self.items() if not task.runs]
        for number in ended:
            del self[number]
        return bool(ended)


def node_number() -> int:
    """Tells the autograd node that runs from those before it, without holding on to it."""
    node = torch._C._current_autograd_node()
    return -1 if node is None else int(node._sequence_nr())
