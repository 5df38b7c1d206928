"""The handle of work in flight, whoever does the work."""

import contextlib
import time
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any, Protocol, TypeVar

import torch

from unwall.native import interrupts
from unwall.tiers.meter import LinkMeter

_POLL_SECONDS = 50e-6


class Ticket(Protocol):
    """Work in flight. It owns its buffers until the work has ended. ``NativeTicket`` is one, too.

    ``wait`` may be called again and from any thread: every call gives the same outcome.
    """

    def done(self) -> bool:
        """True once the work has ended, well or not. Never blocks."""
        ...

    def wait(self, timeout: float | None = None) -> None:
        """Blocks until the work has ended and raises what it failed with.

        Raises TimeoutError after ``timeout`` seconds; the work goes on and the ticket stays usable.
        """
        ...


class Finished:
    """Work that has already ended well."""

    def done(self) -> bool:
        return True

    def wait(self, timeout: float | None = None) -> None:  # noqa: ARG002 (the protocol's signature)
        return


Result = TypeVar("Result")


def result_of(future: "Future[Result]", timeout: float | None = None) -> Result:
    """Waits for it and raises what it failed with. See [Note: interrupts] in native/interrupts.py."""
    while timeout is None and not future.done():
        try:
            return future.result(interrupts.SLICE_SECONDS)
        except TimeoutError:
            interrupts.check()
    return future.result(timeout)


class FutureTicket:
    """Work on a Python thread."""

    def __init__(self, future: "Future[None]") -> None:
        self._future = future

    def done(self) -> bool:
        return self._future.done()

    def wait(self, timeout: float | None = None) -> None:
        try:
            result_of(self._future, timeout)
        except TimeoutError as error:
            if self._future.done():
                raise
            raise TimeoutError(f"work has not finished after {timeout} s") from error


class EventTicket:
    """Work queued on a device stream: ends when the stream has passed ``event``.

    ``wait`` blocks the calling thread; ``order`` makes a stream wait instead and costs the thread nothing. Like a native
    ticket it waits in its finaliser, because the buffers in ``keep`` must not go while the device uses them.
    """

    def __init__(self, event: "torch.cuda.Event", keep: tuple[Any, ...] = ()) -> None:
        self._event = event
        self._keep = keep

    def done(self) -> bool:
        return bool(self._event.query())

    def wait(self, timeout: float | None = None) -> None:
        if timeout is None:
            self._event.synchronize()
        else:
            deadline = time.monotonic() + timeout
            while not self.done():  # the device offers no wait with a time-out
                if time.monotonic() >= deadline:
                    raise TimeoutError(f"device work has not finished after {timeout} s")
                time.sleep(_POLL_SECONDS)
        self._keep = ()

    def order(self, stream: "torch.cuda.Stream") -> None:
        """What is queued on ``stream`` from now on runs after this work."""
        stream.wait_event(self._event)

    def end(self) -> "EventTicket":
        """Another ticket for the same work, which holds on to no buffer."""
        return EventTicket(self._event)

    def __del__(self) -> None:
        with interrupts.finalizing, contextlib.suppress(Exception):  # the device failed, or the interpreter is shutting down
            if self._keep:
                self._event.synchronize()


class Joined:
    """Several pieces of work as one. Waits for all of them, then raises the first failure."""

    def __init__(self, parts: Sequence[Ticket]) -> None:
        self._parts = tuple(parts)

    def done(self) -> bool:
        return all(part.done() for part in self._parts)

    def wait(self, timeout: float | None = None) -> None:
        deadline = None if timeout is None else time.monotonic() + timeout
        failure: Exception | None = None
        for part in self._parts:
            try:
                part.wait(None if deadline is None else max(0.0, deadline - time.monotonic()))
            except Exception as error:
                if deadline is not None and isinstance(error, TimeoutError):
                    raise TimeoutError(f"work has not finished after {timeout} s") from error
                failure = failure or error
        if failure is not None:
            try:
                raise failure
            finally:
                del failure  # it and this frame would keep each other, and all that the callers know


class Metered:
    """A ticket whose waits are counted on a link."""

    def __init__(self, inner: Ticket, meter: LinkMeter, label: str) -> None:
        self.inner = inner
        self._meter = meter
        self._label = label

    def done(self) -> bool:
        return self.inner.done()

    def wait(self, timeout: float | None = None) -> None:
        if self.inner.done():
            self.inner.wait(timeout)
            return
        with self._meter.stalled(self._label):
            self.inner.wait(timeout)


def hold_back(ticket: Ticket, device: torch.device) -> None:
    """Waits for ``ticket``'s work, so that this thread does not run too far ahead of the device. It is a stall only where this
    thread is what computes: an accelerator goes on with what was queued on it."""
    inner = ticket.inner if isinstance(ticket, Metered) and device.type != "cpu" else ticket
    inner.wait()


def end_of(ticket: Ticket) -> Ticket:
    """A ticket for the end of ``ticket``'s work, for someone who shall not hold on to its buffers any longer. Waiting for it is
    no stall of a link."""
    inner = ticket.inner if isinstance(ticket, Metered) else ticket
    return inner.end() if isinstance(inner, EventTicket) else inner


def order_after(ticket: Ticket, device: torch.device) -> None:
    """What is queued on the device's current stream from now on runs after ``ticket``'s work. Blocks only where the work is not
    on a stream."""
    inner = ticket.inner if isinstance(ticket, Metered) else ticket
    if isinstance(inner, EventTicket):
        inner.order(torch.cuda.current_stream(device))
    else:
        ticket.wait()
