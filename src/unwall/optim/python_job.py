"""Python work as a link in a chain of native work: it starts after native tickets, and native work can start after it."""

import errno
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from unwall.native.ticket import NativeTicket, Signal


class PythonJob(Signal):
    """Runs ``work`` on a thread for such jobs, first in, first out, once every ticket of ``after`` has ended well."""

    def __init__(self, work: Callable[[], None], after: Sequence[NativeTicket] = ()) -> None:
        super().__init__()
        self._span = (time.monotonic(), 0.0, 0.0)
        self._error: Exception | None = None
        _thread().submit(self._run, work, tuple(after))

    def _run(self, work: Callable[[], None], after: tuple[NativeTicket, ...]) -> None:
        start = 0.0
        try:
            for ticket in after:
                ticket.wait()
            start = time.monotonic()
            work()
        except Exception as error:
            self._error = error.with_traceback(None)  # which would keep everything its callers knew
        self._span = (self._span[0], start, time.monotonic())
        if self._error is None:
            self.set()
        else:
            self.set(errno.ECANCELED, str(self._error))

    def wait(self, timeout: float | None = None) -> None:
        try:
            super().wait(timeout)
        except TimeoutError:
            raise
        except Exception:
            if isinstance(self._error, OSError):  # of what it came after
                raise self._error from None
            if self._error is not None:
                raise RuntimeError(f"{type(self._error).__name__}: {self._error}") from self._error
            raise

    def times(self) -> tuple[float, float, float]:
        return self._span


_threads: dict[int, ThreadPoolExecutor] = {}  # by process: a forked child needs its own


def _thread() -> ThreadPoolExecutor:
    pid = os.getpid()
    if pid not in _threads:
        _threads[pid] = ThreadPoolExecutor(1, thread_name_prefix="unwall python job")
    return _threads[pid]
