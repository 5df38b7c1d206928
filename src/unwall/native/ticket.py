"""The handle of native work in flight."""

import ctypes
import os
from collections.abc import Callable
from typing import Any

from unwall.native import interrupts
from unwall.native.library import ErrorRecord, Handle, function

_Record = ctypes.POINTER(ErrorRecord)
_Nanoseconds = ctypes.POINTER(ctypes.c_int64)
_SLICE_NS = int(interrupts.SLICE_SECONDS * 1e9)
_orphans: list[Any] = []
"""Buffers of work that does not end and that nobody wants to wait for any more. They must not go."""


class NativeTicket:
    """Native work in flight. It owns (keeps alive) every buffer the work touches until the work has ended.

    ``wait`` may be called any number of times and from any thread: each call gives the same outcome, so several users can
    wait for one piece of work. A ticket that nobody waited for and that is dropped while its work still runs waits in its
    finaliser, because its buffers must not be freed under the work.
    """

    def __init__(self, handle: int, keep: tuple[Any, ...] = ()) -> None:
        self._handle = handle
        self._pid = os.getpid()
        self._keep = keep
        self._finished = False
        self._failure: ErrorRecord | None = None
        self._seen: Callable[[float, float], None] | None = None

    @property
    def handle(self) -> int:
        """The native id, for the ``after`` list of further work."""
        return self._handle

    def done(self) -> bool:
        """True once the work has ended, well or not. Never blocks."""
        return self._finished or function("uw_ticket_done", ctypes.c_int, Handle)(self._handle) != 0

    def wait(self, timeout: float | None = None) -> None:
        """Blocks until the work has ended and raises what it failed with.

        Raises TimeoutError after ``timeout`` seconds; the work goes on and the ticket stays usable.
        """
        if not self._finished:
            if os.getpid() != self._pid:
                raise RuntimeError(f"this work belongs to process {self._pid}: a forked child cannot wait for it")
            record = ErrorRecord()
            call = function("uw_ticket_wait", ctypes.c_int, Handle, ctypes.c_int64, _Record)
            code = call(self._handle, _SLICE_NS if timeout is None else int(timeout * 1e9), ctypes.byref(record))
            while code == 1 and timeout is None:  # in slices: native code does not notice a signal
                interrupts.check()
                code = call(self._handle, _SLICE_NS, ctypes.byref(record))
            if code == 1:
                raise TimeoutError(f"work of ticket {self._handle} has not finished after {timeout} s")
            self._finish(record if code < 0 else None)
        if self._failure is not None:
            raise self._failure.exception()  # a new one each time: one that was raised holds everything its callers knew

    def times(self) -> tuple[float, float, float]:
        """Seconds (monotonic clock) when the work was submitted, started and finished; 0.0 for what is still to come."""
        values = [ctypes.c_int64() for _ in range(3)]
        call = function("uw_ticket_times", ctypes.c_int, Handle, _Nanoseconds, _Nanoseconds, _Nanoseconds)
        if call(self._handle, *[ctypes.byref(value) for value in values]) < 0:
            raise ValueError(f"ticket {self._handle} was released")
        return values[0].value / 1e9, values[1].value / 1e9, values[2].value / 1e9

    def observe(self, seen: Callable[[float, float], None]) -> None:
        """``seen`` is called once, when the work is known to have ended, with the seconds of its start and end."""
        self._seen = seen

    def _tell(self) -> None:
        seen, self._seen = self._seen, None
        if seen is not None:
            _, start, end = self.times()
            seen(start, end)

    def _finish(self, failure: ErrorRecord | None) -> None:
        if self._finished:
            return
        self._tell()
        self._failure = failure
        self._finished = True  # last: another thread may be looking
        self._keep = ()

    def __del__(self) -> None:
        try:
            with interrupts.finalizing:
                self._finalize()
        except (TypeError, AttributeError):  # the interpreter is shutting down and has taken ctypes apart
            pass

    def _finalize(self) -> None:
        if os.getpid() != self._pid:  # a forked child has none of the threads that finish the work
            return
        if not self._finished:
            call = function("uw_ticket_wait", ctypes.c_int, Handle, ctypes.c_int64, _Record)
            while call(self._handle, _SLICE_NS, None) == 1:
                if interrupts.insists():
                    _orphans.append(self._keep)
                    return
            self._tell()
        function("uw_ticket_release", ctypes.c_int, Handle)(self._handle)


class Signal(NativeTicket):
    """A ticket that is finished by hand, so that native work can be chained after something outside."""

    def __init__(self) -> None:
        super().__init__(function("uw_signal_create", Handle)())

    def set(self, code: int = 0, message: str = "") -> None:
        """Finishes the ticket: well, or with an errno and a message. A second call is a ValueError."""
        call = function("uw_signal_set", ctypes.c_int, Handle, ctypes.c_int32, ctypes.c_char_p)
        if call(self._handle, code, message.encode()) < 0:
            raise ValueError(f"ticket {self._handle} was already set")

    def _finalize(self) -> None:
        if os.getpid() == self._pid and not self.done():
            self.set(125, "the signal was dropped before it was set")  # ECANCELED: whatever waits must not wait for ever
        super()._finalize()
