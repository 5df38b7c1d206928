"""Ctrl-C, and whatever else a signal handler raises, waits for the edges of our own code.

[Note: interrupts]
Python runs the handler of a signal between any two instructions of the main thread, and whatever it raises (KeyboardInterrupt,
a time-out, SystemExit) comes there. Inside a fetch or a step that would leave things half done: memory that nobody accounts
for, a step of which some groups know. So whatever the user's loop calls here (module hooks, callbacks of backward, ``step``,
finalisers) runs inside ``deferred``: a signal is noted there, and its handler is called where the outermost of them ends.
Entering and leaving count up and down and cost next to nothing. The handlers are ours: each passes the signal on to the one
that was there, at once or at that edge, so a handler of the user works as before, also one that is installed later (``install``
looks again when a pass or a step begins). A signal that is noted twice is passed on once, as the kernel does it.

Nothing becomes impossible to interrupt. A second Ctrl-C is raised at once; a wait that takes long looks (``check``) whether a
signal was noted; and one that has been waiting for ``GRACE_SECONDS`` is passed on wherever the main thread is then: accounts
and states are still true after that, but a step may have been taken in part. Work in flight is outwaited in any case, see
[Note: work in flight] in shards/flat.py. Other threads than the main one never see a signal and are not concerned, nor are
handlers that are not written in Python (faulthandler's) and those of profilers, which want to know where the program is.
"""

import _signal  # type: ignore[import-not-found]
import _thread
import functools
import os
import signal
import sys
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from threading import get_ident, main_thread
from types import FrameType
from typing import Any, NamedTuple, ParamSpec, TypeVar

SLICE_SECONDS = 0.2
"""How long a wait lasts before it looks whether it is wanted any more."""
GRACE_SECONDS = 10.0
"""How long a signal other than Ctrl-C may wait for the edge."""
DEFERRED = (signal.SIGINT, signal.SIGTERM, signal.SIGALRM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
"""Signals whose handlers people write to raise something."""
_REMIND_SECONDS = 0.01
_URGE_SECONDS = 1.0
_FINALISERS = ("__del__", "gone")
"""Functions that Python calls when something goes: ``gone`` where a weak reference tells of it."""

P = ParamSpec("P")
R = TypeVar("R")

main_ident = main_thread().ident or 0
"""Of the thread that signals come to."""


class _State:
    """Where the main thread is, and what it was told meanwhile."""

    __slots__ = ("committed", "depth", "finals", "insisted", "noted", "urging")

    def __init__(self) -> None:
        self.depth = 0
        """Sections of ours that are on its stack."""
        self.finals = 0
        """Those of them that are finalisers: an exception there would be lost."""
        self.committed = False
        """They must not be left half way, not even from a wait."""
        self.noted: dict[int, Noted] = {}
        """By number, in the order in which they came."""
        self.insisted = False
        """A second Ctrl-C came while one was noted, in a finaliser."""
        self.urging = False
        """A thread looks after what is noted. See ``_urge``."""


_state = _State()


class Handler:
    """The handler of a signal, over the one that was there before. See [Note: interrupts]."""

    def __init__(self, previous: Callable[[int, FrameType | None], Any]) -> None:
        self.previous = previous

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if _state.depth and not self._is_urgent(number):
            self._note(number)
            return
        if not _state.depth and _begins_finaliser(frame):
            self._note(number)
            _start_reminding()
            return
        first = _state.noted.pop(number, None)
        depth, committed = _state.depth, _state.committed
        _state.depth, _state.committed = 0, False  # a section that is left before it has begun does not count it down
        if first is not None and number == signal.SIGINT:
            first.handler.previous(number, frame)
        self.previous(number, frame)
        _state.depth, _state.committed = depth, committed  # it raised nothing: the section goes on

    def _is_urgent(self, number: int) -> bool:
        """Whether it is passed on inside a section, too."""
        noted = _state.noted.get(number)
        if noted is None or _state.finals:
            return False
        return number == signal.SIGINT or time.monotonic() - noted.since >= GRACE_SECONDS

    def _note(self, number: int) -> None:
        if number == signal.SIGINT:
            _state.insisted = number in _state.noted
        _state.noted.setdefault(number, Noted(self, time.monotonic()))
        if number != signal.SIGINT and not _state.urging:
            _state.urging = True
            with suppress(RuntimeError):  # the interpreter is shutting down
                _thread.start_new_thread(_urge, ())


class Noted(NamedTuple):
    """A signal that waits for the edge."""

    handler: Handler
    since: float


def install() -> None:
    """From now on signals are deferred. Whoever handles them now is asked when they are passed on."""
    if get_ident() != main_ident:
        return
    for number in DEFERRED:
        current = _signal.getsignal(number)  # signal's own looks for an enum's member each time
        if callable(current) and type(current) is not Handler:  # otherwise it is ignored, or ends the process
            with suppress(ValueError):  # the main thread of another interpreter in this process
                signal.signal(number, Handler(current))


def _pass_on(frame: FrameType) -> None:
    """Everything that was noted, in its order. What one handler raises does not keep the signal of the next one back."""
    _state.insisted = False
    if not _state.noted:
        return
    number = next(iter(_state.noted))
    noted = _state.noted.pop(number)
    try:
        noted.handler.previous(number, frame)
    finally:
        _pass_on(frame)


def _urge() -> None:
    """Sends signals again that have been waiting for too long, until nothing is noted."""
    while True:
        time.sleep(_URGE_SECONDS)
        for number, noted in list(_state.noted.items()):
            if number != signal.SIGINT and time.monotonic() - noted.since >= GRACE_SECONDS:
                signal.pthread_kill(main_ident, number)
        if not _state.noted:
            _state.urging = False
            if not _state.noted:  # noted just now, perhaps, by someone who saw that this thread is there
                return
            _state.urging = True


class _Deferred:
    """A section of ours. May be entered again inside."""

    __slots__ = ()

    def __enter__(self) -> None:
        if get_ident() == main_ident:
            _state.depth += 1

    def __exit__(self, *_: object) -> None:
        if get_ident() == main_ident:
            if _state.depth > 1:
                _state.depth -= 1
                return
            _state.depth = 0
            _state.committed = False
            if _state.noted:
                _pass_on(sys._getframe(1))


class _Finalizing:
    """The same for a finaliser, which cannot raise: the signal comes a moment later, wherever that is."""

    __slots__ = ()

    def __enter__(self) -> None:
        if get_ident() == main_ident:
            _state.depth += 1
            _state.finals += 1

    def __exit__(self, *_: object) -> None:
        if get_ident() == main_ident:
            _state.finals = max(0, _state.finals - 1)
            _state.depth = max(0, _state.depth - 1)
            if not _state.depth and _state.noted:
                _start_reminding()


def _begins_finaliser(frame: FrameType | None) -> bool:
    """Whether a finaliser of ours is on the stack, ahead of its section or behind it: Python looks for signals where a function
    begins, so that of a long C call, which drops something at its end, would be lost there, and what was to be freed, too."""
    while frame is not None:
        if frame.f_code.co_name in _FINALISERS and str(frame.f_globals.get("__name__")).startswith("unwall."):
            return True
        frame = frame.f_back
    return False


def _start_reminding() -> None:
    with suppress(RuntimeError):  # the interpreter is shutting down
        _thread.start_new_thread(_remind, ())  # not threading's: the finaliser may run inside it


def _remind() -> None:
    time.sleep(_REMIND_SECONDS)
    noted, _state.noted, _state.insisted = _state.noted, {}, False
    for number in noted:
        signal.pthread_kill(main_ident, number)  # a real one: it wakes the main thread up where it waits


deferred = _Deferred()
finalizing = _Finalizing()


class Gone(weakref.finalize):  # type: ignore[type-arg]  # generic only for type checkers
    """``weakref.finalize`` that runs whole: a signal in the middle would be lost, and so would what was to be freed."""

    __slots__ = ()

    def gone(self, _: object = None) -> Any:
        if getattr(self, "_shutdown", False):  # the interpreter ends, and the names of this module are gone, perhaps
            return None
        with finalizing:
            return super().__call__(_)

    __call__ = gone


def commit() -> None:
    """What was begun is ended: from here on the outermost section is not left from a wait. A second Ctrl-C still is raised."""
    if _state.depth and get_ident() == main_ident:
        _state.committed = True


def defers(function: Callable[P, R]) -> Callable[P, R]:
    """A function that the user calls, as a section of ours."""

    @functools.wraps(function)
    def whole(*args: P.args, **kwargs: P.kwargs) -> R:
        with deferred:
            return function(*args, **kwargs)

    return whole


def check() -> None:
    """For waits that take long, where the caller can be left: passes on what was noted."""
    if _state.noted and not _state.committed and not _state.finals and get_ident() == main_ident:
        _pass_on(sys._getframe(1))


def insists() -> bool:
    """For waits in finalisers: Ctrl-C came twice."""
    return _state.insisted and get_ident() == main_ident


def _reset() -> None:
    """In a forked child, whose main thread is the one that forked."""
    global main_ident, _state
    main_ident, _state = get_ident(), _State()


os.register_at_fork(after_in_child=_reset)
