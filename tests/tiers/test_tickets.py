"""Handles of work in flight: every wait gives the same outcome."""

import contextlib
import errno
import gc
import time
import weakref
from concurrent.futures import Future

import pytest
import torch

from unwall.native.ticket import Signal
from unwall.tiers.meter import LinkMeter
from unwall.tiers.ticket import EventTicket, Finished, FutureTicket, Joined, Metered, hold_back


class Work:
    """A ticket, and the way to end its work."""

    def __init__(self, kind: str) -> None:
        self.signal = Signal()
        self.future: Future[None] = Future()
        self.kind = kind
        self.ticket = {
            "native": lambda: self.signal,
            "future": lambda: FutureTicket(self.future),
            "joined": lambda: Joined([Finished(), self.signal]),
            "metered": lambda: Metered(self.signal, LinkMeter("a>b"), "w"),
        }[kind]()

    def end(self, failed: bool) -> None:
        if self.kind == "future":
            self.future.set_exception(OSError(errno.EIO, "broken")) if failed else self.future.set_result(None)
        else:
            self.signal.set(errno.EIO if failed else 0, "broken")


@pytest.fixture(params=["native", "future", "joined", "metered"])
def work(request) -> Work:
    return Work(request.param)


def test_waiting_twice_after_success(work):
    assert not work.ticket.done()
    work.end(failed=False)
    work.ticket.wait()
    work.ticket.wait(0)
    assert work.ticket.done()


def test_waiting_twice_after_failure_gives_the_same(work):
    work.end(failed=True)
    assert work.ticket.done()
    errors = []
    for timeout in (None, 0):
        with pytest.raises((OSError, RuntimeError), match="broken") as caught:
            work.ticket.wait(timeout)
        errors.append((type(caught.value), str(caught.value)))
    assert errors[0] == errors[1]


@pytest.mark.parametrize("kind", ["native", "joined", "metered"])
def test_a_failure_that_was_raised_holds_nothing_of_its_callers(kind):
    work = Work(kind)

    class Held:
        pass

    def call():
        held = Held()
        with contextlib.suppress(OSError, RuntimeError):
            work.ticket.wait()
        return weakref.ref(held)

    work.end(failed=True)
    gc.disable()
    try:
        assert call()() is None
    finally:
        gc.enable()


def test_a_time_out_leaves_the_ticket_usable(work):
    for _ in range(2):
        with pytest.raises(TimeoutError, match=r"not finished after 0\.01 s"):
            work.ticket.wait(0.01)
    assert not work.ticket.done()
    work.end(failed=False)
    work.ticket.wait(0)


def test_joined_waits_for_all_then_raises_the_first_failure():
    good, first, second = Signal(), Signal(), Signal()
    joined = Joined([good, first, second])
    first.set(errno.EIO, "first")
    with pytest.raises(TimeoutError, match=r"not finished after 0\.01 s"):
        joined.wait(0.01)
    second.set(errno.EIO, "second")
    assert not joined.done()
    good.set()
    assert joined.done()
    with pytest.raises(RuntimeError, match="first"):
        joined.wait()


def test_joined_shares_one_time_out_among_its_parts():
    class Slow:
        """Ends after half a second, however often it is asked."""

        def __init__(self) -> None:
            self.asked: list[float] = []

        def done(self) -> bool:
            return False

        def wait(self, timeout: float | None = None) -> None:
            self.asked.append(timeout)
            time.sleep(0.02)

    parts = [Slow() for _ in range(4)]
    Joined(parts).wait(0.05)
    asked = [part.asked[0] for part in parts]
    assert asked == sorted(asked, reverse=True)
    assert asked[-1] == 0


def test_metered_counts_only_a_wait_that_blocks():
    meter, signal = LinkMeter("host>device"), Signal()
    ticket = Metered(signal, meter, "w")
    with pytest.raises(TimeoutError, match="not finished"):
        ticket.wait(0.01)
    assert meter.read().stalls["w"] >= 0.01
    before = meter.read()
    signal.set()
    ticket.wait()
    assert meter.read() == before


@pytest.mark.parametrize(("device", "stalled"), [("cpu", True), ("cuda", False)])
def test_holding_back_is_a_stall_only_where_the_thread_computes(device, stalled):
    class EndsWhenWaitedFor(Signal):
        def wait(self, timeout=None):
            self.set()
            super().wait(timeout)

    meter, signal = LinkMeter("device>host"), EndsWhenWaitedFor()
    hold_back(Metered(signal, meter, "w"), torch.device(device))
    assert signal.done()
    assert ("w" in meter.read().stalls) == stalled


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no accelerator here")
def test_an_event():
    stream, keep = torch.cuda.Stream(), torch.zeros(1)
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)
        event = torch.cuda.Event()
        event.record(stream)
    ticket = EventTicket(event, (keep,))
    with pytest.raises(TimeoutError, match=r"device work has not finished after 0\.001 s"):
        ticket.wait(0.001)
    assert not ticket.done()
    ticket.wait()
    ticket.wait(0)
    assert ticket.done()
