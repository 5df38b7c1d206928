"""A few threads for the work of one save.

Not an executor of ``concurrent.futures``: those take no work once the main thread has ended, and a save that goes on beside
training may be what a script ends with.
"""

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any


class Threads:
    """Runs work first in, first out."""

    def __init__(self, count: int, name: str) -> None:
        self._work: queue.SimpleQueue[tuple[Future[None], Callable[[], Any]] | None] = queue.SimpleQueue()
        self._threads = [threading.Thread(target=self._serve, name=name, daemon=True) for _ in range(count)]
        for thread in self._threads:
            thread.start()

    def submit(self, work: Callable[[], Any]) -> "Future[None]":
        future: Future[None] = Future()
        self._work.put((future, work))
        return future

    def close(self) -> None:
        """Ends the threads, once what was submitted is done."""
        for _ in self._threads:
            self._work.put(None)
        for thread in self._threads:
            thread.join()
        self._threads = []

    def _serve(self) -> None:
        while (found := self._work.get()) is not None:
            future, work = found
            try:
                work()
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(None)
            del found, future, work
