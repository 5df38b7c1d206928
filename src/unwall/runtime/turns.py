"""Whose turn it is to use a model: one thread at a time.

[Note: turns]
A forward, a backward, a step, a state dict: each takes a turn, and another thread that comes meanwhile waits until it has
ended. So an evaluation beside training, or a thread that saves, gets what it would have got alone. A forward is over when its
outermost call returns; the backward of the same pass takes a turn of its own, and another thread may use the model between the
two.

A turn belongs to a thread; that of a backward to every thread that works for it (autograd has some for accelerators). Nothing
tells of a turn that ended with an interrupt, so whoever waits asks what began it whether it is over: a backward its graph task
(runtime/graph_task.py), a call its own Python frame, which cannot be cleared while it is executed. Frames of another thread are
never followed from one to the next: that thread goes on meanwhile, and the next one may be gone.

Waiting could be for ever: a forward that starts threads which run parts of the same model waits for them, and they for it.
After ``PATIENCE_SECONDS`` in which the other one has used nothing, that is an error. Over several ranks nobody waits: the order
of two threads could differ between ranks. But for one: whoever called a backward that ended with an exception hears of that a
moment before the thread of autograd's that ran it has let go of its graph task. Not every version of torch tells who called, so
a backward that uses nothing more is given ``GRACE_SECONDS`` to be over; one that goes on is another thread's.

A child that was forked has the model's memory but none of the threads that move it: using the model there is an error.
"""

import functools
import os
import threading
import time
import weakref
from collections.abc import Callable
from contextvars import ContextVar
from types import FrameType
from typing import Concatenate, NoReturn, ParamSpec, Protocol, TypeVar

import torch

from unwall.native import interrupts

PATIENCE_SECONDS = 60.0
GRACE_SECONDS = 5.0
_LOOK_SECONDS = 0.05


class Token:
    """Something that can be told from everything else, and asked whether it is still there. ``thread``: who made it."""

    __slots__ = ("__weakref__", "thread")

    def __init__(self) -> None:
        self.thread = threading.get_ident()


class _Here(threading.local):
    """Goes with its thread."""

    def __init__(self) -> None:
        self.token = Token()


_here = _Here()
_taken: "ContextVar[Token | None]" = ContextVar("unwall_turn", default=None)
"""The turn that this thread took last. torch hands the context of whoever calls backward to the threads that work for it."""


class Held:
    """A turn, while something is done."""

    __slots__ = ("_turn", "_what")

    def __init__(self, turn: "Turn", what: str) -> None:
        self._turn, self._what = turn, what

    def __enter__(self) -> None:
        taken = False
        try:
            with interrupts.deferred:
                self._turn.begin(self._what)
                taken = True
        except BaseException:
            if taken:  # what was noted meanwhile is raised at the end of the section
                self._turn.end()
            raise

    def __exit__(self, *_: object) -> None:
        self._turn.end()


class Turn:
    """The turns of one model. See [Note: turns]. ``progress``: a number that changes while the model is in use."""

    def __init__(self, ranks: int, progress: Callable[[], object]) -> None:
        self._alone = ranks == 1
        self._progress = progress
        self._pid = os.getpid()
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._waiting = 0
        """Threads that want to be told of a change."""
        self._thread: int | None = None
        self._what = ""
        self._during: FrameType | Callable[[], bool] | None = None
        """The Python frame that the turn ends with, or what says whether it goes on. None: with its thread, at the latest."""
        self._is_backward = False
        self._token: Token | None = None
        self._place = weakref.ref(_here.token)
        """Gone when the thread is."""
        self._caller: Token | None = None
        """Of a backward: the turn that its caller had taken last."""
        self._nested = 0
        """Turns inside it, of the same thread."""

    def begin(self, what: str, during: FrameType | Callable[[], bool] | None = None, *, backward: bool = False) -> None:
        """Waits for its turn. RuntimeError in a forked child, and where waiting would be in vain.

        ``during``: what the turn ends with, where ``end`` may not be called: see ``_is_over``."""
        if os.getpid() != self._pid:
            self._refuse_process(what)
        me = threading.get_ident()
        with interrupts.deferred, self._lock:
            if self._thread is not None and not self._is_over():
                if self._thread == me or (backward and self._works_for_holder()):
                    self._nested += 1
                    return
                self._wait(what)
            self._thread, self._what, self._during, self._is_backward, self._nested = me, what, during, backward, 0
            self._place = weakref.ref(_here.token)
            self._caller = _taken_by_caller() if backward else None
            self._token = Token()
            _taken.set(self._token)

    @property
    def is_nested(self) -> bool:
        """For who has it: whether it is within another one."""
        return self._nested > 0

    def end(self) -> None:
        """Nothing to do where another thread has found it over."""
        with interrupts.deferred, self._lock:
            if self._thread is None:
                return
            if not self._is_backward and self._thread != threading.get_ident() and not self._works_for_holder():
                return
            if self._nested:
                self._nested -= 1
                return
            self._thread = self._during = None
            if self._waiting:
                self._changed.notify_all()

    def held(self, what: str) -> "Held":
        """For ``with``: a turn around what is inside."""
        return Held(self, what)

    def is_mine(self, during: FrameType | None = None) -> bool:
        """Whether this thread has it, and until that frame ends, if one is named."""
        return self._thread == threading.get_ident() and (during is None or self._during is during)

    def name(self) -> str:
        """Whose turn it is, for messages."""
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        return f"thread {names.get(self._thread, self._thread)!r} ({self._what})"

    def _refuse_process(self, what: str) -> NoReturn:
        raise RuntimeError(
            f"{what} in a forked child (process {os.getpid()}): the model was sharded in process {self._pid}, and the "
            "threads that move its states are there. Use it there, or start processes with 'spawn' and shard one in each"
        )

    def _look_again(self) -> None:
        """Waits for a change, or a moment."""
        self._waiting += 1
        try:
            self._changed.wait(_LOOK_SECONDS)
        finally:
            self._waiting -= 1
        interrupts.check()

    def _is_over(self) -> bool:
        """Whether what began the turn has ended without saying so."""
        if isinstance(self._during, FrameType):
            return not is_executed(self._during)
        return self._place() is None if self._during is None else not self._during()

    def _works_for_holder(self) -> bool:
        """A backward that is called inside a forward may run on a thread of autograd's."""
        taken = _taken_by_caller()
        return taken is not None and taken is self._token

    def _called_from_here(self) -> bool:
        """Whether it is a backward that this thread has called. As this thread does something else now, it has ended.

        By its thread, not by the turn itself: meanwhile the caller may have used another model, and a thread that was started
        with a copy of the caller's context has not called anything."""
        mine = self._caller is not None and self._caller.thread == threading.get_ident()
        return mine and torch._C._current_graph_task_id() == -1

    def _ends_unused(self) -> bool:
        """Whether it is a backward that ends without using the model any more: it had failed. See [Note: turns]."""
        seen, since = self._progress(), time.monotonic()
        while self._is_backward and self._thread is not None and not self._is_over():
            if self._progress() != seen or time.monotonic() - since > GRACE_SECONDS:
                return False
            self._look_again()
        return self._is_backward

    def _wait(self, what: str) -> None:
        if not self._alone and not self._called_from_here() and not self._ends_unused():
            raise RuntimeError(
                f"{what}: {self.name()} is using the model. Over several ranks one thread uses a model, because ranks would "
                "meet in another order: do it there, or one after the other"
            )
        seen, since = self._progress(), time.monotonic()
        while self._thread is not None and not self._is_over():
            self._look_again()
            if self._progress() != seen:
                seen, since = self._progress(), time.monotonic()
            elif time.monotonic() - since > PATIENCE_SECONDS:
                raise RuntimeError(
                    f"{what}: {self.name()} has been using the model for {PATIENCE_SECONDS:.0f} s without getting on. One "
                    "thread at a time uses a sharded model: a forward must not wait for threads that run parts of it"
                )


def _taken_by_caller() -> Token | None:
    """On a thread of autograd's: the turn that whoever called backward had taken last."""
    context = torch._C._get_obj_in_tls("context") if torch._C._is_key_in_tls("context") else None
    taken: Token | None = None if context is None else context.get(_taken)  # None: older versions leave that behind
    return taken


class HasTurn(Protocol):
    """An engine."""

    turn: Turn


E = TypeVar("E", bound=HasTurn)
P = ParamSpec("P")
R = TypeVar("R")


def alone(method: "Callable[Concatenate[E, P], R]") -> "Callable[Concatenate[E, P], R]":
    """A method of an engine as a turn of its own, in which interrupts are deferred."""

    @functools.wraps(method)
    def whole(engine: E, /, *args: P.args, **kwargs: P.kwargs) -> R:
        with interrupts.deferred, engine.turn.held(method.__name__):
            return method(engine, *args, **kwargs)

    return whole


def is_executed(frame: FrameType) -> bool:
    """Whether a call still runs, on whatever thread. One that is over loses what its local variables refer to."""
    try:
        frame.clear()
    except RuntimeError:  # "cannot clear an executing frame"
        return True
    return False
