"""Updates on the host: in the order they are asked for; one that failed holds up those of its own domain, and no other."""

import errno
import os
import signal
import subprocess
import sys
import threading
import weakref
from concurrent.futures import Future

import pytest
from busy import until
from early_tools import wait_until
from letting_go import gone

from unwall.native import interrupts
from unwall.native.ticket import Signal
from unwall.optim.updates import HostUpdate, Rest, drain, on_update_thread
from unwall.runtime.failures import FailureDomain


class Work:
    """Notes that it ran; fails as often as it is told to."""

    def __init__(self, done, name, failures=0):
        self.done, self.name, self.failures = done, name, failures

    def __call__(self):
        if self.failures:
            self.failures -= 1
            raise OSError(f"{self.name} failed")
        self.done.append(self.name)


def test_updates_run_in_the_order_they_are_asked_for_off_the_callers_thread():
    done, threads = [], []
    tickets = [HostUpdate(Work(done, name), FailureDomain()) for name in "abc"]
    HostUpdate(lambda: threads.append(on_update_thread()), FailureDomain()).wait()
    assert (done, threads, on_update_thread()) == (["a", "b", "c"], [True], False)
    assert all(ticket.done() for ticket in tickets)


def test_a_failed_update_holds_up_its_own_domain_only():
    done, mine, other = [], FailureDomain(), FailureDomain()
    first = HostUpdate(Work(done, "first", failures=1), mine, again=True)
    second = HostUpdate(Work(done, "second"), mine)
    HostUpdate(Work(done, "other"), other).wait()
    assert done == ["other"]
    with pytest.raises(OSError, match="first failed"):
        first.wait()
    second.wait()  # tries the first one again
    assert done == ["other", "first", "second"]
    first.wait()
    assert done == ["other", "first", "second"]


def test_each_wait_tries_once_and_raises_what_came_of_it():
    done, domain = [], FailureDomain()
    first = HostUpdate(Work(done, "first", failures=3), domain, again=True)
    second = HostUpdate(Work(done, "second"), domain)
    for ticket in (first, second, first):
        with pytest.raises(OSError, match="first failed"):
            ticket.wait()
    second.wait()
    assert done == ["first", "second"]


def test_an_update_that_cannot_be_tried_again_holds_up_nobody():
    done, domain = [], FailureDomain()
    failed = HostUpdate(Work(done, "first", failures=1), domain)
    HostUpdate(Work(done, "second"), domain).wait()
    for _ in range(2):
        with pytest.raises(OSError, match="first failed"):
            failed.wait()
    assert done == ["second"]


def test_a_failed_update_that_nobody_waits_for_any_more_holds_up_nobody():
    done, domain = [], FailureDomain()
    failed = HostUpdate(Work(done, "first", failures=1), domain, again=True)
    drain()
    assert domain.failed is failed
    del failed
    assert gone(lambda: domain.failed is None)
    HostUpdate(Work(done, "second"), domain).wait()
    assert done == ["second"]


@pytest.mark.parametrize("in_parts", [False, True])
def test_whoever_has_waited_for_an_update_may_let_go_of_its_model_at_once(in_parts, monkeypatch):
    """Though the thread may be held up right after it has told the end."""
    set_result, go_on = Future.set_result, threading.Event()

    def slowly(future, value):
        set_result(future, value)
        go_on.wait(200)

    work = Parts([], "parts") if in_parts else Work([], "whole")
    if in_parts:
        work.params.set()
        work.go_on.set()
    kept = weakref.ref(work)
    with monkeypatch.context() as patched:
        patched.setattr(Future, "set_result", slowly)
        update = HostUpdate(work, FailureDomain())
        update.wait_for_params()  # the thread that finishes is another one
        if in_parts:
            wait_until(update.done)
        del update, work
        found = gone(lambda: kept() is None, limit_s=0.0)
        go_on.set()
    assert found
    drain()


def test_drain_waits_for_what_was_asked_for_and_raises_nothing():
    done, domain = [], FailureDomain()
    failed = HostUpdate(Work(done, "first", failures=1), domain, again=True)
    behind = HostUpdate(Work(done, "second"), domain)
    drain()
    assert failed.done()
    assert behind.done()
    assert done == []


class Parts(Work):
    """Is under way as a whole at once; its rest ends, or fails, when it is let go."""

    def __init__(self, done, name, failures=0):
        super().__init__(done, name, failures)
        self.params, self.go_on = Signal(), threading.Event()

    def __call__(self):
        return Rest(self.finish, (self.params,))

    def finish(self):
        assert self.go_on.wait(200)
        super().__call__()


def test_the_next_update_begins_while_the_rest_of_one_is_under_way():
    done, domain = [], FailureDomain()
    parts = Parts(done, "parts")
    first = HostUpdate(parts, domain)
    HostUpdate(Work(done, "second"), domain).wait()
    assert (done, first.done(), first.params_done()) == (["second"], False, False)
    parts.params.set()
    first.wait_for_params()
    assert (first.done(), first.params_done()) == (False, True)
    parts.go_on.set()
    drain()
    assert (done, first.done()) == (["second", "parts"], True)


def test_rests_that_fail_are_tried_again_in_order():
    done, domain = [], FailureDomain()
    works = [Parts(done, name, failures=1) for name in ("first", "second")]
    updates = [HostUpdate(work, domain, again=True) for work in works]
    for work in works:
        work.params.set()
        work.go_on.set()
    drain()
    assert domain.failed is updates[0]
    with pytest.raises(OSError, match="first failed"):
        updates[1].wait()  # it is behind the other one
    for update in reversed(updates):
        update.wait()
    assert (done, domain.failed) == (["first", "second"], None)


def test_parameters_whose_update_failed_are_not_read():
    done, domain = [], FailureDomain()
    parts = Parts(done, "parts", failures=1)
    update = HostUpdate(parts, domain, again=True)
    parts.params.set(errno.EIO, "not written")
    parts.go_on.set()
    with pytest.raises(OSError, match="parts failed"):
        update.wait_for_params()


class LateError(Exception):
    """What a signal's handler raises."""


@pytest.fixture
def alarm():
    """Makes the next check for signals raise ``LateError``."""

    def raise_it(*_):
        raise LateError

    before = signal.signal(signal.SIGALRM, raise_it)
    interrupts.install()
    yield lambda: os.kill(os.getpid(), signal.SIGALRM)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("wait", [HostUpdate.wait, HostUpdate.wait_for_params])
def test_a_wait_that_a_signals_handler_ends_does_not_end_the_update(alarm, wait):
    may_end, left, ended = threading.Event(), [1], []

    def finish():
        may_end.wait(200)
        ended.append(1)

    def work():  # what is left to do is done by then
        return Rest(finish, ()) if left and left.pop() else None

    blocker = threading.Event()
    HostUpdate(until(blocker), FailureDomain())
    update = HostUpdate(work, FailureDomain(), again=True)

    def wait_deferred():
        with interrupts.deferred:
            alarm()
            wait(update)

    with pytest.raises(LateError):
        wait_deferred()
    blocker.set()
    may_end.set()
    update.wait()
    assert ended == [1]


AT_THE_END = """
import concurrent.futures.thread as threads, sys, time, torch, unwall
from unwall.optim.updates import HostUpdate
from unwall.runtime.failures import FailureDomain

plan = unwall.Plan(params="disk", grads="host", optimizer="disk", disk=sys.argv[1])
model = unwall.shard(torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(12)]), plan)
optimizer = unwall.AdamW(model.parameters())
model(torch.randn(2, 64)).float().sum().backward()

def until_the_end():
    while not threads._shutdown:
        time.sleep(0.01)

HostUpdate(until_the_end, FailureDomain())
optimizer.step()
"""


def test_updates_through_the_disk_that_the_interpreters_end_overtakes(tmp_path):
    subprocess.run([sys.executable, "-c", AT_THE_END, tmp_path], check=True, timeout=280)
