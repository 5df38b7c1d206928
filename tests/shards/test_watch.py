"""The thread that looks after the other ranks outlives what fails there."""

import datetime
import gc
import os
import threading
import warnings
from pathlib import Path

import pytest

from unwall.shards import looking
from unwall.shards.collectives import Collective
from unwall.shards.control import Control, DivergedError
from unwall.shards.looking import _adding, _known, look_safely
from unwall.shards.processes import state_of
from unwall.shards.watch import Watch


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
        _known.discard(watch)  # looked at here, not by the thread
    looked = threading.Event()
    other = Watch(None, 0, 2)
    other.look = looked.set
    looking.wake.set()
    assert looked.wait(60)  # so the thread has looked at all that it knew of before
    watch.onlookers.add(onlooker)
    with pytest.warns(RuntimeWarning, match="ArithmeticError: told to"):
        look_safely(watch)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        look_safely(watch)


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
        patch.setattr(looking, "LOOK_S", 600.0)
        looking.wake.set()  # the thread waits for ten minutes from now on
        watch.tell_end("the ranks cannot go on")
        assert given_up.wait(60)
    looking.wake.set()


def test_what_the_device_is_stuck_in_is_given_up_although_its_model_goes_first():
    """Who raises lets go of the model, whose finalisers wait for the device: nobody else would free them."""
    watch = Watch(None, 0, 2)
    with _adding:
        _known.discard(watch)  # looked at here, when the model has gone
    given_up = []

    class Stuck:
        def give_up(self):
            given_up.append(True)

    stuck = Stuck()
    watch.stuck.add(stuck)
    watch.tell_end("the ranks cannot go on")
    del stuck
    gc.collect()
    watch.look()
    assert given_up == [True]
    watch.look()
    assert given_up == [True]


def test_who_waits_for_a_collective_raises_before_the_process_group_is_given_up(capfd):
    """Once it is given up, torch's watchdog may end the process before anything is said."""
    watch = Watch(None, 0, 2)
    with _adding:
        _known.discard(watch)  # nobody else looks, and gives up a second time
    control = Control(None, watch, 0, 2, datetime.timedelta(seconds=600))
    order = []

    class Stuck:
        def give_up(self):
            raised.wait(60)  # in a process that torch ended nobody would come to raise
            order.append("given up")

    class Never:
        def is_completed(self):
            waits.set()
            return False

        def wait(self):
            raise AssertionError("the device would wait for ever")

    waits, raised, stuck = threading.Event(), threading.Event(), Stuck()
    watch.stuck.add(stuck)

    def wait():
        with pytest.raises(DivergedError, match=r"waits at all-gather .* cannot go on: rank 1 has ended"):
            Collective(Never(), label="all-gather", control=control).arrive()
        order.append("raised")
        raised.set()

    thread = threading.Thread(target=wait)
    thread.start()
    waits.wait()
    watch.end = "rank 1 has ended"
    watch.look()
    thread.join()
    assert order == ["raised", "given up"]
    assert "unwall: rank 0 gives its collectives up: rank 1 has ended" in capfd.readouterr().err


def test_a_collective_that_ended_because_it_was_given_up_has_brought_nothing():
    """torch calls work completed that was aborted, and waits for it no more: what it should have filled holds anything."""
    watch = Watch(None, 0, 2)
    control = Control(None, watch, 0, 2, datetime.timedelta(seconds=600))

    class Aborted:
        def is_completed(self):
            watch.end = "rank 1 has ended"  # said before anything is given up
            return True

        def wait(self):
            pass

    with pytest.raises(DivergedError, match="cannot go on: rank 1 has ended"):
        Collective(Aborted(), label="all-gather", control=control).arrive()
