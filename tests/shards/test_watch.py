"""The thread that looks after the other ranks outlives what fails there."""

import os
import threading
import warnings
from pathlib import Path

import pytest

from unwall.shards import watch as watching
from unwall.shards.watch import Watch, _adding, _look_safely, _watches, state_of


class FailingStore:
    """A store that is gone, and says so in a way of its own."""

    def check(self, keys):
        raise KeyError(keys[0])

    def set(self, key, text):
        raise EOFError(key)


class Failing:
    def look(self):
        raise ArithmeticError("told to")


def test_a_store_that_fails_has_nothing_to_say():
    watch = Watch(FailingStore(), 0, 2)
    watch.look()
    watch.tell_fault("a fault")
    watch.tell_end("the end")
    assert (watch.fault, watch.end) == ("", "the end")
    assert watch.faults_of([1]) == "rank 1 failed: (it did not say why)"


def test_a_look_that_fails_is_told_once_and_the_thread_goes_on():
    watch, onlooker = Watch(None, 0, 2), Failing()
    with _adding:
        _watches.discard(watch)  # looked at here, not by the thread
    looked = threading.Event()
    other = Watch(None, 0, 2)
    other.look = looked.set
    watching._wake.set()
    assert looked.wait(60)  # so the thread has looked at all that it knew of before
    watch.onlookers.add(onlooker)
    with pytest.warns(RuntimeWarning, match="ArithmeticError: told to"):
        _look_safely(watch)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _look_safely(watch)


def test_a_process_that_has_begun_to_end_is_dead():
    """It may go on giving back memory for seconds, and its other threads may seem to run."""
    running = Path(f"/proc/{os.getpid()}/stat").read_text()
    state, began = state_of(running)
    assert state in "RS"
    name, _, rest = running.rpartition(")")
    fields = rest.split()
    fields[0], fields[6] = "D", str(int(fields[6]) | 0x4)
    assert state_of(f"{name}) {' '.join(fields)}") == ("X", began)
    assert state_of("") == ("", "")


def test_what_the_device_is_stuck_in_is_given_up_at_once(monkeypatch):
    """Torch's own watchdog would end the process."""
    given_up = threading.Event()

    class Stuck:
        def give_up(self):
            given_up.set()

    watch, stuck = Watch(None, 0, 2), Stuck()
    watch.stuck.add(stuck)
    with monkeypatch.context() as patch:
        patch.setattr(watching, "LOOK_S", 600.0)
        watching._wake.set()  # the thread waits for ten minutes from now on
        watch.tell_end("the ranks cannot go on")
        assert given_up.wait(60)
    watching._wake.set()
