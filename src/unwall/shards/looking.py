"""The thread of a process that looks after the other ranks, for every set of ranks that it belongs to. See [Note: watch] in
shards/watch.py.

It goes on whatever happens in a look, or nobody would be told of anything any more.
"""

import atexit
import os
import sys
import threading
import warnings
import weakref
from typing import Protocol

LOOK_S = 0.5
"""How often the thread looks into the store."""


class Looks(Protocol):
    """Knows where to look: a ``Watch``."""

    failed: bool
    """A look has failed, and that was said."""

    def look(self) -> None:
        """What is new. On the thread."""

    def let_go(self) -> None:
        """Keeps the store no longer."""


_known: "weakref.WeakSet[Looks]" = weakref.WeakSet()
_adding = threading.Lock()
_leaving = threading.Event()
wake = threading.Event()
"""The thread looks at once."""
_thread: threading.Thread | None = None
_owner = os.getpid()
"""The process whose ranks are looked after."""


def begin(watch: Looks) -> None:
    """From now on the thread looks there, as long as someone else keeps it."""
    global _thread, _owner
    _owner = os.getpid()
    with _adding:
        _known.add(watch)
    if _thread is None or not _thread.is_alive():  # a forked child has none
        _thread = threading.Thread(target=_look, name="unwall-watch", daemon=True)
        _thread.start()


def _all() -> list[Looks]:
    with _adding:  # or the set changes while it is read
        return list(_known)


def _look() -> None:
    while True:
        wake.wait(LOOK_S)
        wake.clear()
        if _leaving.is_set():
            return
        for watch in _all():
            look_safely(watch)
        watch = None  # type: ignore[assignment]  # nothing here keeps it


def look_safely(watch: Looks) -> None:
    """One look that may fail. Said once for each set of ranks."""
    try:
        watch.look()
    except Exception as error:
        if not watch.failed:
            watch.failed = True
            warnings.warn(
                f"the thread that looks after the other ranks met {type(error).__name__}: {error}. It goes on, but faults of "
                "other ranks may be told later than usual",
                RuntimeWarning,
                stacklevel=2,
            )


def script_has_ended(thread: int) -> bool:
    """Whether this is the main thread, which has nothing left to do but to wait for others. Not in the exit handlers that come
    afterwards: one of them may use the model."""
    main = threading.main_thread()
    if thread != main.ident or main.is_alive():
        return False
    frame = sys._current_frames().get(thread)
    while frame is not None and (frame.f_code.co_name, frame.f_globals.get("__name__")) != ("_shutdown", "threading"):
        frame = frame.f_back
    return frame is not None


@atexit.register
def _stop_looking() -> None:
    """The thread must not outlive the interpreter, nor the stores. A forked child has neither."""
    if os.getpid() != _owner:
        return
    _leaving.set()
    wake.set()
    if _thread is not None:
        _thread.join(timeout=2 * LOOK_S)
    for watch in _all():
        watch.let_go()
