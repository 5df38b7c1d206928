"""Waits for other ranks that last: what ends them, and what is said meanwhile. Two ranks' sides in one process."""

import os
import signal
import subprocess
import sys
import threading
import time
import warnings
import weakref

import pytest
from torch.distributed import HashStore

from unwall.shards import long_wait, looking
from unwall.shards.long_wait import LongWait
from unwall.shards.processes import look_up
from unwall.shards.watch import Watch


@pytest.fixture
def pair():
    """The watches of two ranks over one store, looked at here and not by the thread."""
    store = HashStore()
    watches = Watch(store, 0, 2), Watch(store, 1, 2)
    with looking._adding:
        looking._known.difference_update(watches)
    return watches


def waiting(watch, seconds):
    found = LongWait(watch, 0, "an exchange")
    found._began -= seconds
    return found


class Ended(threading.Thread):
    """Stands for a main thread that is over."""

    ident = threading.get_ident()

    def is_alive(self):
        return False


@pytest.fixture
def at_the_end(monkeypatch):
    """Calls a function as while the interpreter waits for other threads."""
    there = {"__name__": "threading"}
    exec("def _shutdown(function):\n    function()", there)

    def call(function):
        with monkeypatch.context() as patch:
            patch.setattr(threading, "main_thread", Ended)
            there["_shutdown"](function)

    return call


def test_a_rank_whose_script_has_ended_is_not_waited_for(pair, at_the_end):
    waits, leaves = pair
    assert waiting(waits, 30).look() == ""
    at_the_end(leaves.look)
    assert waiting(waits, -600).look() == ""  # what it has sent may just be coming
    assert waiting(waits, 30).look() == "rank 1 has come to the end of its script"
    assert f"rank 1 has come to the end of its script (process {os.getpid()} is still there)" in waits._describe(1)
    assert leaves.left() == ""


def test_the_end_of_the_main_thread_is_no_matter_of_one_that_trains_elsewhere(pair, at_the_end):
    waits, leaves = pair
    at_the_end(leaves.look)
    assert waits.left() == "rank 1"
    leaves.thread = -1  # which has used the model since
    at_the_end(leaves.look)
    assert waits.left() == ""


def test_an_exit_handler_may_use_the_model(pair, monkeypatch):
    waits, leaves = pair
    with monkeypatch.context() as patch:
        patch.setattr(threading, "main_thread", Ended)
        leaves.look()
    assert waits.left() == ""


def test_a_rank_that_is_stopped_is_named_while_it_is_waited_for(pair):
    waits, _ = pair
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        try:
            other.send_signal(signal.SIGSTOP)
            os.waitpid(other.pid, os.WUNTRACED)
            waits._processes[1] = waits._process(1)._replace(pid=other.pid, began=look_up(other.pid)[1])
            wait = waiting(waits, 30)
            said = r"waiting for \d+ s at an exchange, and goes on waiting: rank 1 is stopped \(process"
            with pytest.warns(RuntimeWarning, match=said):
                assert wait.look() == ""
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                assert wait.look() == ""  # once for each wait
                assert waiting(waits, 30).look() == ""  # where warnings are errors it waits nevertheless
        finally:
            other.kill()


def test_where_all_ranks_are_is_said_once_after_a_minute(pair, monkeypatch):
    waits, _other = pair
    monkeypatch.setattr("unwall.shards.watch.ANSWER_S", 0.0)
    with pytest.warns(RuntimeWarning, match=r"rank 0 has been waiting for \d+ s at an exchange.*rank 1 runs"):
        assert waiting(waits, long_wait.SLOW_S + 30).look() == ""
    with warnings.catch_warnings(record=True) as more:
        warnings.simplefilter("always")
        assert waiting(waits, long_wait.SLOW_S + 30).look() == ""
    assert not [given for given in more if "waiting" in str(given.message)]


def test_a_rank_that_waits_for_this_one_does_not_fail_alike(pair):
    """Ten minutes are allowed here; the answer is there when the other rank's thread has looked."""
    fails, waits = pair
    waits.waits_since = time.monotonic() - 30
    looking.begin(waits)
    assert not fails.come_alike("alike", 600.0)


def test_where_a_rank_is_may_take_many_words(pair):
    fails, waits = pair

    class Place:
        def words(self):
            return "far away " * 1000

    place = Place()
    waits.place = weakref.WeakMethod(place.words)
    waits.waits_since = time.monotonic() - 30
    asked = fails._ask()
    waits.look()
    assert fails._waits(1, asked)
    assert "it is far away far away" in fails._describe(1)


def test_all_ranks_agree_on_whether_they_fail_alike(pair):
    """The second one comes when the first has given it up, or while that waits."""
    first, second = pair
    assert not first.come_alike("late", 0.0)
    assert not second.come_alike("late", 600.0)
    second._set("early/1", "here")
    assert first.come_alike("early", 600.0)
    assert second.come_alike("early", 0.0)
