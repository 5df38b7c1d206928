"""An exception that nobody catches ends the thread that trains: the other ranks are told at once.

[Note: uncaught]
A script fails outside of unwall, in its data loader, say. Its process ends, and whoever waits for it finds that out; but it may
take long to end, or not end at all (a thread that still runs, a process group that waits for the others in turn). So unwall's
``sys.excepthook`` and ``threading.excepthook`` tell the others before they call those that were there. Only of the thread that
used the model last: what befalls others (one that logs) is no matter of the ranks. At a prompt nothing ends.
"""

import contextlib
import os
import sys
import threading
import traceback
import weakref
from types import TracebackType
from typing import Any, Protocol


class Told(Protocol):
    """Passes on what ends this rank."""

    thread: int
    """The one that used the model last."""

    def tell_ended(self, what: str) -> None:
        """The ranks cannot go on."""


_told: "weakref.WeakSet[Told]" = weakref.WeakSet()
_adding = threading.Lock()
_before: tuple[Any, Any] | None = None
os.register_at_fork(after_in_child=_told.clear)  # a child is no rank, whatever it dies of


def tell_uncaught(watch: Told) -> None:
    """From now on the other ranks hear of an exception that ends the thread that trains. See [Note: uncaught]."""
    global _before
    with _adding:
        _told.add(watch)
        if _before is None:
            _before = sys.excepthook, threading.excepthook
            sys.excepthook, threading.excepthook = _in_main_thread, _in_thread


def _in_main_thread(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    assert _before is not None
    _tell(error, trace, threading.get_ident())
    _before[0](kind, error, trace)


def _in_thread(given: Any) -> None:
    assert _before is not None
    if given.exc_value is not None and given.exc_type is not SystemExit:
        _tell(given.exc_value, given.exc_traceback, threading.get_ident())
    _before[1](given)


def _tell(error: BaseException, trace: TracebackType | None, thread: int) -> None:
    if hasattr(sys, "ps1"):
        return
    with contextlib.suppress(Exception):  # whatever happens here, the error itself is shown
        with _adding:
            concerned = [watch for watch in _told if watch.thread == thread]
        last = traceback.extract_tb(trace)[-1:]
        at = "".join(f" ({os.path.basename(frame.filename)}, line {frame.lineno})" for frame in last)
        for watch in concerned:
            watch.tell_ended(f"{type(error).__name__}: {error}{at}")
