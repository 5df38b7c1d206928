"""What optimizers that are gone leave behind in the models they worked on.

A finaliser may run on any thread, under any lock: it only adds to a queue of each engine. The engine frees what is in there
where waiting and locking is allowed, on a thread that calls it.
"""

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from unwall.native.interrupts import Gone

if TYPE_CHECKING:
    from unwall.runtime.engine import Engine

Free = Callable[["Engine"], None]
"""Gives back what an optimizer had in one engine. What cannot be given back yet adds itself to the engine's queue again."""


class Leftovers:
    """Sees to it that ``free`` is called by every engine that was noted, once ``optimizer`` is gone."""

    def __init__(self, optimizer: object, free: Free) -> None:
        self._free = free
        self._queues: list[deque[Free]] = []  # an engine's queue outlives it, and does not keep it
        Gone(optimizer, self._discard).atexit = False

    def note(self, engine: "Engine") -> None:
        """The optimizer has something there."""
        if all(queue is not engine.discarded for queue in self._queues):
            self._queues.append(engine.discarded)

    def _discard(self) -> None:
        for queue in self._queues:
            queue.append(self._free)
