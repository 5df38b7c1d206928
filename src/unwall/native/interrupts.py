"""Ctrl-C waits for the edges of our own code.

[Note: interrupts]
Python raises KeyboardInterrupt between any two instructions of the main thread. Inside a fetch or a step that would leave
things half done: memory that nobody accounts for, a step of which some groups know. So whatever the user's loop calls here
(module hooks, callbacks of backward, ``step``, finalisers) runs inside ``deferred``: an interrupt is noted there and raised
where the outermost of them ends. Entering and leaving count up and down and cost next to nothing. The handler is ours: it
passes the signal on to the one that was there, at once or at that edge, so a handler of the user works as before, also one that
is installed later (``install`` looks again when a pass begins).

Nothing becomes impossible to interrupt: a second Ctrl-C is raised at once, and a wait that takes long looks (``check``) whether
one was noted. Work in flight is outwaited in any case, see [Note: work in flight] in shards/flat.py. Other threads than the
main one never see a signal and are not concerned. Exceptions that other handlers raise (an alarm) come at any place: then
accounts and states are still true, but a step may have been taken in part.
"""

import _thread
import functools
import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from threading import get_ident, main_thread
from types import FrameType
from typing import Any, ParamSpec, TypeVar

SLICE_SECONDS = 0.2
"""How long a wait lasts before it looks whether it is wanted any more."""
_REMIND_SECONDS = 0.01

P = ParamSpec("P")
R = TypeVar("R")

_main = main_thread().ident or 0


class _State:
    """Where the main thread is, and what it was told meanwhile."""

    __slots__ = ("committed", "depth", "finals", "insisted", "noted")

    def __init__(self) -> None:
        self.depth = 0
        """Sections of ours that are on its stack."""
        self.finals = 0
        """Those of them that are finalisers: an exception there would be lost."""
        self.committed = False
        """They must not be left half way, not even from a wait."""
        self.noted: Handler | None = None
        self.insisted = False
        """A signal came while one was noted, in a finaliser."""


_state = _State()


class Handler:
    """The handler of SIGINT, over the one that was there before. See [Note: interrupts]."""

    def __init__(self, previous: Callable[[int, FrameType | None], Any]) -> None:
        self.previous = previous

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if _state.depth and (_state.noted is None or _state.finals):
            _state.insisted = _state.noted is not None
            _state.noted = self
            return
        first, _state.noted = _state.noted, None
        _state.depth = 0  # a section that is left before it has begun does not count it down
        _state.committed = False
        if first is not None:
            first.previous(number, frame)
        self.previous(number, frame)


def install() -> None:
    """From now on interrupts are deferred. Whoever handles them now is asked when they are raised."""
    if get_ident() != _main:
        return
    current = signal.getsignal(signal.SIGINT)
    if callable(current) and not isinstance(current, Handler):  # otherwise they are ignored, or end the process
        with suppress(ValueError):  # the main thread of another interpreter in this process
            signal.signal(signal.SIGINT, Handler(current))


def _raise() -> None:
    noted, _state.noted = _state.noted, None
    _state.insisted = False
    if noted is not None:
        noted.previous(signal.SIGINT, sys._getframe(2))


class _Deferred:
    """A section of ours. May be entered again inside."""

    __slots__ = ()

    def __enter__(self) -> None:
        if get_ident() == _main:
            _state.depth += 1

    def __exit__(self, *_: object) -> None:
        if get_ident() == _main:
            if _state.depth > 1:
                _state.depth -= 1
                return
            _state.depth = 0
            _state.committed = False
            if _state.noted is not None:
                _raise()


class _Finalizing:
    """The same for a finaliser, which cannot raise: the interrupt comes a moment later, wherever that is."""

    __slots__ = ()

    def __enter__(self) -> None:
        if get_ident() == _main:
            _state.depth += 1
            _state.finals += 1

    def __exit__(self, *_: object) -> None:
        if get_ident() == _main:
            _state.finals = max(0, _state.finals - 1)
            _state.depth = max(0, _state.depth - 1)
            if not _state.depth and _state.noted is not None:
                with suppress(RuntimeError):  # the interpreter is shutting down
                    _thread.start_new_thread(_remind, ())  # not threading's: the finaliser may run inside it


def _remind() -> None:
    time.sleep(_REMIND_SECONDS)
    if _state.noted is not None:
        _state.noted, _state.insisted = None, False
        signal.pthread_kill(_main, signal.SIGINT)  # a real one: it wakes the main thread up where it waits


deferred = _Deferred()
finalizing = _Finalizing()


def commit() -> None:
    """What was begun is ended: from here on the outermost section is not left from a wait. A second Ctrl-C still is raised."""
    if _state.depth and get_ident() == _main:
        _state.committed = True


def defers(function: Callable[P, R]) -> Callable[P, R]:
    """A function that the user calls, as a section of ours."""

    @functools.wraps(function)
    def whole(*args: P.args, **kwargs: P.kwargs) -> R:
        with deferred:
            return function(*args, **kwargs)

    return whole


def check() -> None:
    """For waits that take long, where the caller can be left: raises what was noted."""
    if _state.noted is not None and not _state.committed and not _state.finals and get_ident() == _main:
        _raise()


def insists() -> bool:
    """For waits in finalisers: Ctrl-C came twice."""
    return _state.insisted and get_ident() == _main


def _reset() -> None:
    """In a forked child, whose main thread is the one that forked."""
    global _main, _state
    _main, _state = get_ident(), _State()


os.register_at_fork(after_in_child=_reset)
