"""Ctrl-C inside our own code waits for its edge, and is never lost."""
# ruff: noqa: PT012 (where it is raised is what is tested)

import contextlib
import signal
import sys
import threading
import time

import pytest
from interrupting import AtEvent

from unwall.native import interrupts
from unwall.native.ticket import NativeTicket, Signal
from unwall.tiers.disk import DiskTier


class Alarm(Exception):
    """What the user's handler of an alarm raises."""


def alarmed(number, frame):
    raise Alarm(number)


@pytest.fixture(autouse=True)
def handler():
    before = {
        signal.SIGINT: signal.signal(signal.SIGINT, signal.default_int_handler),
        signal.SIGALRM: signal.signal(signal.SIGALRM, alarmed),
    }
    interrupts.install()
    yield
    for number, previous in before.items():
        signal.signal(number, previous)


def interrupt():
    signal.raise_signal(signal.SIGINT)


def test_an_interrupt_waits_for_the_edge_of_the_outermost_section():
    done = []
    with pytest.raises(KeyboardInterrupt), interrupts.deferred:
        with interrupts.deferred:
            interrupt()
            done.append("inner")
        done.append("outer")
    assert done == ["inner", "outer"]
    with pytest.raises(KeyboardInterrupt):
        interrupt()  # outside: at once


def test_a_second_one_is_raised_at_once_and_the_next_one_waits_again():
    done = []
    with pytest.raises(KeyboardInterrupt), interrupts.deferred, interrupts.deferred:
        interrupt()
        interrupt()
        done.append("not reached")
    with pytest.raises(KeyboardInterrupt), interrupts.deferred:
        interrupt()
        done.append("reached")
    assert done == ["reached"]


@pytest.mark.parametrize("again", [False, True])
def test_a_handler_of_the_user_is_asked_at_the_edge(again):
    seen = []
    before = signal.signal(signal.SIGINT, lambda number, _: seen.append(number))
    interrupts.install()
    if again:  # it may pass the signal on to the one that it has replaced
        inner = signal.signal(signal.SIGINT, lambda number, frame: inner(number, frame))
        interrupts.install()
    with interrupts.deferred:
        interrupt()
        assert seen == []
    assert seen == [signal.SIGINT]
    interrupt()
    assert seen == [signal.SIGINT] * 2
    signal.signal(signal.SIGINT, before)
    with pytest.raises(KeyboardInterrupt), interrupts.deferred:
        interrupt()


def alarm():
    signal.raise_signal(signal.SIGALRM)


def test_what_other_handlers_raise_waits_for_the_edge():
    done = []
    with pytest.raises(Alarm), interrupts.deferred:
        alarm()
        alarm()  # no sign of impatience: a timer may go off many times
        done.append("reached")
    assert done == ["reached"]
    with pytest.raises(Alarm):
        alarm()  # outside: at once
    with interrupts.deferred:
        pass  # nothing is left


def test_no_signal_keeps_another_one_back():
    with pytest.raises(KeyboardInterrupt) as raised, interrupts.deferred:
        alarm()
        interrupt()
    assert isinstance(raised.value.__context__, Alarm)


def test_what_has_waited_for_too_long_is_passed_on(monkeypatch):
    monkeypatch.setattr(interrupts, "GRACE_SECONDS", 0.0)
    done = []
    with pytest.raises(Alarm), interrupts.deferred:
        alarm()
        threading.Event().wait(30)  # the signal that comes again wakes it up
        done.append("not reached")
    assert done == []


def test_a_handler_that_raises_nothing_leaves_the_section_as_it_is(monkeypatch):
    while interrupts._state.urging:  # a thread of the test before would send the signal, too
        time.sleep(0.01)
    monkeypatch.setattr(interrupts._state, "urging", True)
    monkeypatch.setattr(interrupts, "GRACE_SECONDS", 0.0)
    seen = []
    signal.signal(signal.SIGALRM, lambda number, _: seen.append(number))
    interrupts.install()
    with pytest.raises(KeyboardInterrupt), interrupts.deferred:
        alarm()
        alarm()
        assert seen == [signal.SIGALRM]
        interrupt()
        seen.append("inside")
    assert seen == [signal.SIGALRM, "inside"]


def test_what_is_ignored_stays_so():
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    interrupts.install()
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def test_sections_of_other_threads_defer_nothing():
    inside, leave = threading.Event(), threading.Event()

    def work():
        with interrupts.deferred:
            interrupts.install()  # does nothing there
            inside.set()
            leave.wait()

    thread = threading.Thread(target=work)
    thread.start()
    inside.wait()
    try:
        with pytest.raises(KeyboardInterrupt):
            interrupt()
    finally:
        leave.set()
        thread.join()


@pytest.mark.parametrize(("send", "error"), [(interrupt, KeyboardInterrupt), (alarm, Alarm)])
def test_a_wait_that_takes_long_ends(send, error):
    never = Signal()
    with pytest.raises(error), interrupts.deferred:
        send()
        never.wait()
    never.set()


def test_a_wait_ends_what_is_committed_first():
    later = Signal()
    timer = threading.Timer(2 * interrupts.SLICE_SECONDS, later.set)
    done = []
    with pytest.raises(KeyboardInterrupt), interrupts.deferred:
        interrupts.commit()
        interrupt()
        timer.start()
        later.wait()
        done.append("waited")
    assert done == ["waited"]


def test_an_interrupt_in_a_finaliser_comes_a_moment_later():
    class Thing:
        def __del__(self):
            with interrupts.finalizing:
                interrupt()
                interrupt()

    with pytest.raises(KeyboardInterrupt):
        Thing()
        threading.Event().wait(30)


class Seen(NativeTicket):
    """Its finaliser is that of every ticket."""

    def __init__(self, freed):
        super().__init__(0)
        self._freed = freed

    def _finalize(self):
        self._freed.append(self._handle)


@pytest.mark.parametrize("place", [NativeTicket.__del__, type(interrupts.finalizing).__enter__])
def test_an_interrupt_where_a_finaliser_begins_comes_a_moment_later(place):
    """There Python looks for a signal that came in C code before. What was to be freed is freed."""
    freed = []

    def look(frame, event, arg):
        if event == "call" and frame.f_code is place.__code__:
            sys.setprofile(None)
            interrupt()

    with pytest.raises(KeyboardInterrupt):
        sys.setprofile(look)
        Seen(freed)
        threading.Event().wait(30)
    assert freed == [0]


def test_what_is_done_when_an_object_goes_is_done_whole_and_the_interrupt_comes():
    class Thing:
        pass

    def free(steps, done):
        for _ in steps:
            done.append(len(done))

    def dropped(k):
        thing, done = Thing(), []
        interrupts.Gone(thing, free, range(5), done)
        with AtEvent(k) as seen:
            del thing
        assert len(done) == 5
        return seen.events

    places = dropped(None)
    assert places > 5
    for k in range(1, places + 1):
        with pytest.raises(KeyboardInterrupt):
            dropped(k)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # Python's own weak sets lose one
def test_files_of_a_tier_that_goes_are_removed_wherever_an_interrupt_comes(tmp_path):
    def dropped(k):
        tier = DiskTier([tmp_path])
        assert list(tmp_path.iterdir()) == tier.paths
        with AtEvent(k) as seen:
            del tier
        return seen.events

    places = dropped(None)
    assert places > 20
    for k in range(1, places + 1):
        with contextlib.suppress(KeyboardInterrupt):
            dropped(k)
        assert list(tmp_path.iterdir()) == []
