"""Native work ends before the interpreter takes its memory apart.

A ticket that is dropped waits for its work, but the finalisers of an interpreter that shuts down find half of Python gone and
wait for nothing: a copy could still write to memory that is being given back. So at exit, after the threads of Python have
ended and before anything is taken apart, every disk engine is closed and every pool has done what it was given.
"""

import atexit
import contextlib
import os
import threading
import weakref
from typing import Protocol


class Ends(Protocol):
    """Has native threads."""

    def end(self) -> None:
        """Returns when nothing is at work any more. What waits for a signal that nobody will set does not count."""


_disks: "weakref.WeakSet[Ends]" = weakref.WeakSet()
_pools: "weakref.WeakSet[Ends]" = weakref.WeakSet()
_pid = os.getpid()


def ends_at_exit(thing: Ends, *, disk: bool) -> None:
    """``disk``: what it does may start work of a pool, and so it ends first."""
    (_disks if disk else _pools).add(thing)


def say_if_ended(error: RuntimeError) -> None:
    """Of a thread that takes no work any more: why, where it is because the interpreter ends."""
    if not threading.main_thread().is_alive() or "interpreter shutdown" in str(error):
        raise RuntimeError(
            "the script has ended, and with it the threads that copy and update: use the model before, not in a function of "
            "atexit nor in a thread that outlives the script"
        ) from error


@atexit.register
def _end() -> None:
    if os.getpid() != _pid:  # a forked child has none of the threads
        return
    for thing in (*_disks, *_pools):
        with contextlib.suppress(Exception):
            thing.end()
