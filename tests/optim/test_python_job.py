"""Python work between native work."""

import ctypes
import errno

import pytest

from unwall.native.library import NativeError
from unwall.native.pool import WorkerPool
from unwall.native.ticket import Signal
from unwall.optim.python_job import PythonJob


def address(buffer):
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer))


def test_it_runs_after_what_it_waits_for_and_before_what_waits_for_it():
    order, begin = [], Signal()
    job = PythonJob(lambda: order.append("job"), [begin])
    source, target = bytearray(b"before"), bytearray(6)
    with WorkerPool(1) as pool:
        last = PythonJob(lambda: source.__setitem__(slice(None), b"after!"), [job])
        copy = pool.copy(address(target), address(source), 6, after=[last], keep=(source, target))
        assert order == []
        begin.set()
        copy.wait()
    assert order == ["job"]
    assert target == b"after!"
    submitted, start, end = last.times()
    assert 0 < submitted <= start <= end


def test_a_failure_goes_on_to_what_waits_for_it():
    def fail():
        raise KeyError("momentum")

    job = PythonJob(fail)
    later = PythonJob(lambda: None, [job])
    for ticket in (job, later, job):
        with pytest.raises(RuntimeError, match=r"KeyError.*momentum"):
            ticket.wait()


def test_it_does_not_run_after_a_failure():
    ran, begin = [], Signal()
    job = PythonJob(lambda: ran.append(1), [begin])
    begin.set(errno.EIO, "the disk is gone")
    with pytest.raises((RuntimeError, NativeError), match="the disk is gone"):
        job.wait()
    assert ran == []
