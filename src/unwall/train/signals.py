"""Ctrl-C and SIGTERM: the step that runs is finished, the run is saved, and the command ends."""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from threading import current_thread, main_thread
from types import FrameType, TracebackType
from typing import Any

from unwall.terminal import say

AT_ONCE_S = 2.0
"""A launcher passes on the Ctrl-C that the terminal has sent to everyone: two that come so close are one."""


_raised: type[KeyboardInterrupt] | None = None
"""What a signal has raised, whatever became of it."""


class TerminatedError(KeyboardInterrupt):
    """SIGTERM where there is no step to finish: it ends the command as Ctrl-C does."""


@contextmanager
def ending(*numbers: signal.Signals) -> Iterator[None]:
    """Inside, these signals raise KeyboardInterrupt, and that is what it ends with, whatever other code makes of it: an import
    that is left half way fails in its own words, or goes on as if nothing were missing."""
    global _raised
    here = numbers if current_thread() is main_thread() else ()
    before = {
        number: signal.signal(number, _raise) for number in here if signal.getsignal(number) not in (None, signal.SIG_IGN)
    }
    try:
        yield
        if _raised is not None:
            raise _raised
    except Exception as error:
        if _raised is not None:
            raise _raised from error
        raise
    finally:
        if before:
            _raised = None
        for number, handler in before.items():
            signal.signal(number, handler)


def _raise(number: int, frame: FrameType | None) -> None:  # noqa: ARG001 (of signal's signature)
    global _raised
    _raised = TerminatedError if number == signal.SIGTERM else KeyboardInterrupt
    raise _raised


def terminating() -> AbstractContextManager[None]:
    """Inside, SIGTERM raises TerminatedError: before the first step nobody would hear of it otherwise. One of several ranks is
    ended by the signal itself: while it waits inside torch for a rank that is gone, Python comes to call no handler."""
    several = os.environ.get("WORLD_SIZE", "1") != "1"
    return ending(signal.SIGINT) if several else ending(signal.SIGINT, signal.SIGTERM)


def ended_by(error: KeyboardInterrupt) -> int:
    """Says so, on the first rank of a node, and gives the exit status that shells expect."""
    global _raised
    _raised = None
    name = "SIGTERM" if isinstance(error, TerminatedError) else "interrupted"
    if os.environ.get("LOCAL_RANK", "0") == "0":
        say(f"unwall: {name}; what was saved last stays, and the same command goes on from there", error=True)
    return 128 + (signal.SIGTERM if isinstance(error, TerminatedError) else signal.SIGINT)


class StopRequests:
    """Inside, a signal is only noted. A second Ctrl-C ends the command at once, without saving."""

    def __init__(self) -> None:
        global _raised
        dropped, _raised = _raised, None  # one that somebody's code has caught
        self.asked: str | None = None if dropped is None else "SIGTERM" if dropped is TerminatedError else "SIGINT"
        """The signal's name."""
        self._first = 0.0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "StopRequests":
        for number in (signal.SIGINT, signal.SIGTERM):
            self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002 (of signal's signature)
        now = time.monotonic()
        if self.asked is not None and number == signal.SIGINT and now - self._first > AT_ONCE_S:
            raise KeyboardInterrupt
        if self.asked is None:
            self._first, self.asked = now, signal.Signals(number).name
