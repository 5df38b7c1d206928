"""Updates on the host, off the caller's thread, in the order they are asked for.

[Note: order]
One thread takes updates first in, first out: it waits until a gradient has landed, hands the work to the native workers and
waits for them. ``step`` asks in the order of the model, which is the order in which the next forward needs the groups, and
returns at once; a fetch waits for its own group's update only. The results are those of a synchronous step.

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

import torch

from unwall.runtime.failures import FailureDomain
from unwall.tiers.ticket import Ticket, result_of

_THREAD = "unwall update"


class Factor:
    """What gradients are multiplied with. Read on the updating thread: it may still be on its way from the device."""

    def __init__(self, inverse: float, clip: torch.Tensor | None) -> None:
        self._inverse = inverse
        self._clip = clip
        self._lock = threading.Lock()
        self._ready: torch.cuda.Event | None = None
        if clip is not None and clip.is_cuda:  # the thread that reads it knows another stream
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
    after it failed, and does what is left."""

    def __init__(self, work: Callable[[], None], domain: FailureDomain, again: bool = False) -> None:
        self._work = work
        self.domain = domain
        self.again = again
        self._future: Future[None] | None = _queue().submit(self)

    def done(self) -> bool:
        return self._future is not None and self._future.done()

    def wait(self, timeout: float | None = None) -> None:
        """See [Note: failed updates]."""
        while True:
            if self._future is None:
                self._future = _queue().submit(self)
            try:
                result_of(self._future, timeout)
                return
            except _BehindError as behind:
                self._future = None
                behind.first.wait(timeout)
            except Exception as error:
                if isinstance(error, TimeoutError) and not self._future.done():
                    raise TimeoutError(f"the update has not finished after {timeout} s") from error
                if self.again:
                    self._future = None
                raise

    def run(self) -> None:
        self._work()


class _Queue:
    """The thread that updates. See [Note: order]."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=_THREAD)

    def submit(self, update: HostUpdate) -> "Future[None]":
        return self._thread.submit(_run, weakref.ref(update), update.run, update.domain, update.again)


def _run(update: "weakref.ref[Ticket]", run: Callable[[], None], domain: FailureDomain, again: bool) -> None:
    failed = domain.failed
    if failed is not None and failed is not update():
        raise _BehindError(failed)
    try:
        run()
    except Exception:
        if again:
            domain.fail(update)
        raise
    domain.recover()


_queues: dict[int, _Queue] = {}  # by process: a forked child needs its own


def drain() -> None:
    """Waits until every update that was asked for so far, also ahead of its step, has ended, well or not. For tests and
    measurements: whoever needs one update waits for its ticket."""
    HostUpdate(lambda: None, FailureDomain()).wait()


def on_update_thread() -> bool:
    """Whether the caller is the thread that updates, which must not wait for updates."""
    return threading.current_thread().name.startswith(_THREAD)


def _queue() -> _Queue:
    pid = os.getpid()
    if pid not in _queues:
        _queues[pid] = _Queue()
    return _queues[pid]
