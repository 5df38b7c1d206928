"""The thread that looks after the other ranks outlives what fails there."""

import warnings

import pytest

from unwall.shards.watch import Watch, _look_safely, _watches


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
    _watches.discard(watch)  # looked at here, not by the thread
    watch.onlookers.add(onlooker)
    with pytest.warns(RuntimeWarning, match="ArithmeticError: told to"):
        _look_safely(watch)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _look_safely(watch)
