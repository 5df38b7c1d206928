"""Updates on the host, off the caller's thread, in the order they are asked for.

[Note: order]
One thread takes updates first in, first out: it waits until a gradient has landed, hands the work to the native workers and
waits for them. ``step`` asks in the order of the model, which is the order in which the next forward needs the groups, and
returns at once; a fetch waits for its own group's update only. The results are those of a synchronous step.

[Note: failed updates]
An update whose disk requests failed remembers what is left to do. Waiting for it raises the error, once for each attempt; the
next wait tries again, so after the cause is gone training goes on with the values it would have had. Updates asked for later
stay behind it: they were promised in order, and the memory it holds on to is the memory they would need.
"""

import os
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from unwall.native.library import DiskError
from unwall.native.pool import AdamWStep
from unwall.optim.kernels import Span, adamw, finish_updates
from unwall.tiers.meter import LinkMeter
from unwall.tiers.ticket import Ticket


class Factor:
    """What gradients are multiplied with. Read on the updating thread: it may still be on its way from the device."""

    def __init__(self, inverse: float, clip: torch.Tensor | None) -> None:
        self._inverse = inverse
        self._clip = clip
        self.known: float | None = inverse if clip is None else None
        """What it came to, once it was read."""

    def get(self) -> float:
        if self._clip is not None:
            self._inverse *= float(self._clip)
            self._clip = None
        self.known = self._inverse
        return self._inverse


class _BehindError(Exception):
    """An earlier update failed and was not finished yet."""

    def __init__(self, first: "HostUpdate") -> None:
        super().__init__()
        self.first = first


class HostUpdate:
    """The ticket of one group's update. ``work`` can be called again after it failed with a DiskError."""

    def __init__(self, work: Callable[[], None]) -> None:
        self._work = work
        self._future: Future[None] | None = _queue().submit(self)

    def done(self) -> bool:
        return self._future is not None and self._future.done()

    def wait(self, timeout: float | None = None) -> None:
        """See [Note: failed updates]."""
        while True:
            if self._future is None:
                self._future = _queue().submit(self)
            try:
                self._future.result(timeout)
                return
            except _BehindError as behind:
                self._future = None
                behind.first.wait(timeout)
            except DiskError:
                self._future = None
                raise
            except TimeoutError as error:
                if self._future.done():
                    raise
                raise TimeoutError(f"the update has not finished after {timeout} s") from error

    def failure(self) -> BaseException | None:
        """What went wrong in work that has ended, other than in an update before it."""
        error = None if self._future is None else self._future.exception()
        return None if isinstance(error, _BehindError) else error

    def run(self) -> None:
        self._work()


class _Queue:
    """The thread that updates. See [Note: order]."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="unwall update")
        self._failed: weakref.ref[HostUpdate] | None = None

    def submit(self, update: HostUpdate) -> "Future[None]":
        return self._thread.submit(self._run, weakref.ref(update), update.run)

    def _run(self, update: "weakref.ref[HostUpdate]", run: Callable[[], None]) -> None:
        failed = None if self._failed is None else self._failed()
        if failed is not None and failed is not update():
            raise _BehindError(failed)
        try:
            run()
        except DiskError:
            self._failed = update
            raise
        self._failed = None


_queues: dict[int, _Queue] = {}  # by process: a forked child needs its own


def _queue() -> _Queue:
    pid = os.getpid()
    if pid not in _queues:
        _queues[pid] = _Queue()
    return _queues[pid]


def update_in_memory(
    spans: Sequence[tuple[Span, AdamWStep]], landing: Ticket | None, factor: Factor, meter: LinkMeter, label: str
) -> HostUpdate:
    """Queues the update of a group whose states are all in host memory."""

    def work() -> None:
        if landing is not None:
            landing.wait()
        scale = factor.get()
        finish_updates(meter, label, [(adamw(span, step.scaled(scale)), span) for span, step in spans])

    return HostUpdate(work)
