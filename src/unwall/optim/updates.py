"""Updates on the host, off the caller's thread, in the order they are asked for.

[Note: order]
One thread takes updates first in, first out: it waits until a gradient has landed, hands the work to the native workers and
waits for them. ``step`` asks in the order of the model, which is the order in which the next forward needs the groups, and
returns at once; a fetch waits for its own group's update only. The results are those of a synchronous step.

[Note: two at once]
An update through the disk ends with writes, the next one begins with reads. So the thread that updates leaves an update when
all of it is under way, and a second thread, first in, first out as well, waits for the rest of it (``Rest``). What the next
forward fetches, the parameters, may be there before that.

[Note: failed updates]
An update whose disk requests failed remembers what is left to do. Waiting for it raises the error, once for each attempt; the
next wait tries again, so after the cause is gone training goes on with the values it would have had. Updates asked for later
stay behind it: they were promised in order, and the memory it holds on to is the memory they would need. That is so within one
model, whose updates share a ``FailureDomain``; other models go on.
"""

import os
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass

import torch

from unwall.native.at_exit import say_if_ended
from unwall.native.ticket import NativeTicket
from unwall.runtime.failures import FailureDomain
from unwall.tiers.ticket import Ticket, result_of

_THREAD = "unwall update"


@dataclass(frozen=True)
class Rest:
    """What is left of an update that is under way as a whole. See [Note: two at once]."""

    finish: Callable[[], None]
    """Waits for it and raises what it failed with. Called once, on any thread."""
    params: tuple[NativeTicket, ...]
    """When these have ended well the new parameters can be read, and the gradient is used."""


Work = Callable[[], Rest | None]
"""An update, for the thread that updates. None: it has ended."""


@dataclass(frozen=True)
class _Begun:
    """An update whose rest is being waited for."""

    params: tuple[NativeTicket, ...]
    ended: "Future[None]"


class Factor:
    """What gradients are multiplied with. Read on the updating thread: it may still be on its way from the device.

    ``elsewhere``: something is updated on that thread."""

    def __init__(self, inverse: float, clip: torch.Tensor | None, elsewhere: bool = True) -> None:
        self._inverse = inverse
        self._clip = clip
        self._lock = threading.Lock()
        self._ready: torch.cuda.Event | None = None
        if elsewhere and clip is not None and clip.is_cuda:  # the thread that reads it knows another stream
            self._ready = torch.cuda.Event()
            self._ready.record(torch.cuda.current_stream(clip.device))
        self.known: float | None = inverse if clip is None else None
        """What it came to, once it was read."""

    def get(self) -> float:
        with self._lock:  # the thread that trains reads it, too
            if self._clip is not None:
                if self._ready is not None:
                    self._ready.synchronize()
                self._inverse *= float(self._clip)
                self._clip = None
            self.known = self._inverse
            return self._inverse


class _BehindError(Exception):
    """An earlier update failed and was not finished yet."""

    def __init__(self, first: Ticket) -> None:
        super().__init__()
        self.first = first


class HostUpdate:
    """The ticket of one group's update. ``domain``: whom it holds up when it fails. ``again``: ``work`` can be called again
    after it failed, or its rest did, and does what is left."""

    def __init__(self, work: Work, domain: FailureDomain, again: bool = False) -> None:
        self._work = work
        self.domain = domain
        self.again = again
        self._future: Future[_Begun | None] | None = _queue().submit(self)

    def done(self) -> bool:
        begun = _begun(self._future)
        return begun.ended.done() if isinstance(begun, _Begun) else begun

    def params_done(self) -> bool:
        """Whether the wait for the parameters alone has an end: they are there, or something failed."""
        begun = _begun(self._future)
        return all(ticket.done() for ticket in begun.params) if isinstance(begun, _Begun) else begun

    def wait_for_params(self) -> None:
        """The new parameters can be read; other states may still be on their way to the disk. Raises as ``wait`` does."""
        if self._future is None or not self._params_came(self._future):
            self.wait()

    def _params_came(self, future: "Future[_Begun | None]") -> bool:
        """Waits for them. False if something failed, which ``wait`` deals with. What a signal's handler raises is raised."""
        try:
            begun = result_of(future)
        except Exception:
            if not future.done() or future.exception() is None:
                raise
            return False
        for ticket in () if begun is None else begun.params:
            try:
                ticket.wait()
            except Exception:
                if not ticket.done():
                    raise
                return False
        return True

    def wait(self, timeout: float | None = None) -> None:
        """See [Note: failed updates]."""
        while True:
            if self._future is None:
                self._future = _queue().submit(self)
            try:
                begun = result_of(self._future, timeout)
                if begun is not None:
                    result_of(begun.ended, timeout)
                return
            except _BehindError as behind:
                self._future = None
                behind.first.wait(timeout)
            except Exception as error:
                if timeout is not None and isinstance(error, TimeoutError) and not self.done():
                    raise TimeoutError(f"the update has not finished after {timeout} s") from error
                if self.again and self._has_failed():  # otherwise a signal's handler raised it, and the update goes on
                    self._future = None
                raise

    def _has_failed(self) -> bool:
        future = self._future
        if future is None or not future.done():
            return False
        begun = _begun(future)
        if isinstance(begun, _Begun):
            return begun.ended.done() and begun.ended.exception() is not None
        return future.exception() is not None

    def run(self) -> Rest | None:
        return self._work()


def _begun(future: "Future[_Begun | None] | None") -> _Begun | bool:
    """What was begun as a whole, and may not have ended; otherwise whether it has, well or not."""
    if future is None or not future.done():
        return False
    return True if future.exception() is not None else future.result() or True


class _Queue:
    """The threads that update. See [Note: order] and [Note: two at once]."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=_THREAD)
        self._finisher = ThreadPoolExecutor(1, thread_name_prefix="unwall finish")

    def submit(self, update: HostUpdate) -> "Future[_Begun | None]":
        try:
            return self._thread.submit(self._run, weakref.ref(update), [update.run], update.domain, update.again)
        except RuntimeError as error:
            say_if_ended(error)
            raise

    def _run(self, update: "weakref.ref[Ticket]", work: list[Work], domain: FailureDomain, again: bool) -> _Begun | None:
        """``work`` is taken out of its list: once its end is told, nothing on this thread holds the model any more."""
        _check_behind(update, domain)
        try:
            rest = work.pop()()
        except Exception:
            if again:
                with suppress(RuntimeError):  # at the interpreter's end nothing can be submitted any more
                    self._finisher.submit(lambda: None).result()  # one before it may have failed, and it because of that
                _fail(update, domain)
            raise
        if rest is None:
            domain.recover(update)
            return None
        try:
            ended = self._finisher.submit(_finish, update, [rest.finish], domain)
        except RuntimeError:  # at the interpreter's end: nobody else can wait for it
            _finish(update, [rest.finish], domain)
            return None
        return _Begun(rest.params, ended)


def _check_behind(update: "weakref.ref[Ticket]", domain: FailureDomain) -> None:
    failed = domain.failed
    if failed is not None and failed is not update():
        raise _BehindError(failed)


def _finish(update: "weakref.ref[Ticket]", finish: list[Callable[[], None]], domain: FailureDomain) -> None:
    """``finish``: in a list, as in ``_Queue._run``."""
    try:
        finish.pop()()
    except Exception:
        _fail(update, domain)  # before anyone hears of it, and may try again
        raise
    domain.recover(update)


def _fail(update: "weakref.ref[Ticket]", domain: FailureDomain) -> None:
    """Those that come later stay behind it, as it does behind one that failed before."""
    failed = domain.failed
    domain.fail(update)
    if failed is not None and failed is not update():
        raise _BehindError(failed) from None


_queues: dict[int, _Queue] = {}  # by process: a forked child needs its own


def drain() -> None:
    """Waits until every update that was asked for so far, also ahead of its step, has ended, well or not. For tests and
    measurements: whoever needs one update waits for its ticket."""
    HostUpdate(lambda: Rest(lambda: None, ()), FailureDomain()).wait()


def on_update_thread() -> bool:
    """Whether the caller is the thread that updates, which must not wait for updates."""
    return threading.current_thread().name.startswith(_THREAD)


def _queue() -> _Queue:
    pid = os.getpid()
    if pid not in _queues:
        _queues[pid] = _Queue()
    return _queues[pid]
