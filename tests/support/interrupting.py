"""Ctrl-C (or another signal) at a chosen place: a real one, raised at the k-th place of the main thread where the interpreter looks for
signals, too: where a Python function begins or goes on, and behind a call of a C function. Nowhere else: a generator that yields, for
one, cannot bear an exception there.

The profiler's function is kept alive here. An exception in it makes the interpreter drop it; when that happens in a finaliser that the
garbage collector runs, a call of it may be under way further up, and would call whatever lies in that memory then."""

import signal
import sys
import time
import types

from unwall.native import interrupts
from unwall.optim.sharded import ShardedOptimizer
from unwall.runtime.arrived import Arrived
from unwall.runtime.hooks import Enter, Leave

HOOKS = {method.__code__ for method in (Enter.__call__, Leave.__call__, Arrived.__call__)}
HOOKS.add(ShardedOptimizer.zero_grad.__code__)


class AtEvent:
    """Inside: the signal at the ``k``-th event. ``events`` counts them, so a run without ``k`` says how many there are.

    Ends when the signal has come: one that was noted in a finaliser comes a moment later, and must not hit whatever follows."""

    def __init__(self, k: int | None = None, number: int = signal.SIGINT) -> None:
        self.events = 0
        self._k = k
        self._number = number
        self._reminding = 0
        self._remind = interrupts._remind
        self._profile = self._look

    def __enter__(self) -> "AtEvent":
        interrupts._remind = self._counted
        sys.setprofile(self._profile)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)
        until = time.monotonic() + 60
        try:
            while interrupts._state.noted or self._reminding:
                assert time.monotonic() < until, "a signal was noted, and nobody passes it on"
                time.sleep(0.001)
        finally:
            interrupts._remind = self._remind

    def _counted(self) -> None:
        """On the thread that sends the signal again. What is noted is forgotten there, so one of the two is always seen."""
        self._reminding += 1
        try:
            self._remind()
            time.sleep(0.01)  # the main thread sleeps meanwhile, and gets the signal
        finally:
            self._reminding -= 1

    def _look(self, frame: types.FrameType, event: str, arg: object) -> None:
        if event in ("call", "c_return"):
            self._seen(frame, event)
        elif event == "return":
            self._left(frame)

    def _seen(self, frame: types.FrameType, event: str) -> None:
        self.events += 1
        if self.events == self._k:
            signal.raise_signal(self._number)

    def _left(self, frame: types.FrameType) -> None:
        """A function ends."""


class InHook(AtEvent):
    """Inside: SIGINT in the ``k``-th hook of ours, ``later`` events after it began, or when it ends. The same hook on all ranks,
    which run the same program, but another place in it."""

    def __init__(self, k: int | None = None, later: int = 0) -> None:
        super().__init__(k)
        self._later = later
        self._hook: types.FrameType | None = None

    def _seen(self, frame: types.FrameType, event: str) -> None:
        if self._hook is not None:
            self._later -= 1
            if self._later < 0:
                self._raise()
        elif event == "call" and frame.f_code in HOOKS:
            self.events += 1
            if self.events == self._k:
                self._hook = frame

    def _left(self, frame: types.FrameType) -> None:
        if frame is self._hook:
            self._raise()

    def _raise(self) -> None:
        self._hook = None
        signal.raise_signal(signal.SIGINT)
