"""How the worker pool runs jobs: order, failure, closing, threads."""

import contextlib
import ctypes
import os
import signal
import threading
import time
from pathlib import Path

import pytest
import torch

from unwall.native.library import ErrorRecord, Handle, NativeError, function
from unwall.native.pool import AdamWStep, DType, WorkerPool, isa, select_isa
from unwall.native.ticket import NativeTicket, Signal

CHUNK = 1 << 16
LIMIT_S = 120
"""Far beyond what anything here takes, on a busy machine, too."""
pytestmark = pytest.mark.usefixtures("no_ticket_left")


@pytest.fixture
def pool():
    with WorkerPool(2) as made:
        yield made


def add(pool, total, values, after=()):
    return pool.accumulate(total.data_ptr(), values.data_ptr(), total.numel(), after=after, keep=(total, values))


# ---- order -----------------------------------------------------------------------------------------------------------


def test_a_chain_of_jobs_runs_in_order(pool):
    n = 3 * CHUNK + 1
    values, half, back = torch.randn(n), torch.empty(n, dtype=torch.bfloat16), torch.zeros(n)
    first = pool.cast(half.data_ptr(), DType.BF16, values.data_ptr(), DType.F32, n)
    second = pool.cast(back.data_ptr(), DType.F32, half.data_ptr(), DType.BF16, n, after=[first])
    third = add(pool, back, back.clone().fill_(1.0), after=[second])
    third.wait()
    assert torch.equal(back, values.to(torch.bfloat16).float() + 1.0)


def test_a_job_waits_for_every_ticket_in_after(pool):
    gates, total = [Signal(), Signal()], torch.zeros(10)
    ticket = add(pool, total, torch.ones(10), after=gates)
    gates[0].set()
    with pytest.raises(TimeoutError):
        ticket.wait(0.05)
    assert total.sum() == 0
    gates[1].set()
    ticket.wait()
    assert total.sum() == 10


def test_a_waiting_job_does_not_hold_up_the_ones_behind_it(pool):
    gate, blocked, free = Signal(), torch.zeros(10), torch.zeros(10)
    first = add(pool, blocked, torch.ones(10), after=[gate])
    add(pool, free, torch.ones(10)).wait(LIMIT_S)
    assert not first.done()
    gate.set()
    first.wait()


def test_times_tell_submission_start_and_end(pool):
    gate, total = Signal(), torch.zeros(10)
    ticket = add(pool, total, torch.ones(10), after=[gate])
    time.sleep(0.05)
    gate.set()
    ticket.wait()
    submitted, started, finished = ticket.times()
    assert submitted + 0.04 < started <= finished


@pytest.mark.parametrize("n", [10, 1 << 20, (1 << 22) + 77])
@pytest.mark.parametrize("shift", [0, 3])
def test_copy(pool, n, shift):
    source = torch.randint(0, 255, (n + shift,), dtype=torch.uint8)
    target = torch.zeros(n + shift + 1, dtype=torch.uint8)
    pool.copy(target.data_ptr() + shift, source.data_ptr() + shift, n).wait()
    assert torch.equal(target[shift : shift + n], source[shift:])
    assert target[shift + n] == 0


# ---- failure ---------------------------------------------------------------------------------------------------------


def test_a_failed_dependency_fails_the_chain_without_running_it(pool):
    gate, total = Signal(), torch.zeros(3 * CHUNK)
    first = add(pool, total, torch.ones(3 * CHUNK), after=[gate])
    ticket, result = pool.sum_squares(total.data_ptr(), total.numel(), after=[first])
    gate.set(5, "boom")
    with pytest.raises(NativeError, match=r"boom.*EIO"):
        ticket.wait()
    with pytest.raises(NativeError, match="boom"):
        first.wait()
    assert total.sum() == 0
    assert result.nonfinite == -1
    add(pool, total, torch.ones(3 * CHUNK)).wait()  # the pool goes on


def test_a_long_chain_fails_without_deep_recursion(pool):
    gate, total, ones = Signal(), torch.zeros(10), torch.ones(10)
    tickets = [add(pool, total, ones, after=[gate])]
    for _ in range(20_000):
        tickets.append(add(pool, total, ones, after=[tickets[-1]]))
    gate.set(5, "boom")
    for ticket in tickets:
        with pytest.raises(NativeError, match="boom"):
            ticket.wait()
    assert total.sum() == 0


def test_a_dependency_that_vanishes_cancels_the_job(pool):
    handle = function("uw_signal_create", Handle)()
    total = torch.zeros(10)
    ticket = add(pool, total, torch.ones(10), after=[_Borrowed(handle)])
    function("uw_ticket_release", ctypes.c_int, Handle)(handle)
    with pytest.raises(NativeError, match="ECANCELED"):
        ticket.wait(LIMIT_S)
    assert total.sum() == 0


class _Borrowed(NativeTicket):
    def __del__(self):
        pass


def test_a_stale_ticket_in_after_is_refused(pool):
    with pytest.raises(ValueError, match="released or never existed"):
        add(pool, torch.zeros(1), torch.zeros(1), after=[_Borrowed(1 << 60)])


# ---- argument checks -------------------------------------------------------------------------------------------------


def test_null_pointers_are_refused(pool):
    x = torch.zeros(8)
    at, step = x.data_ptr(), AdamWStep(lr=0.1, step=1)
    for arguments, name in (((0, at, at, at), "param"), ((at, 0, at, at), "exp_avg"), ((at, at, 0, at), "exp_avg_sq")):
        with pytest.raises(ValueError, match=f"`{name}` is null"):
            pool.adamw(*arguments, 8, step)
    with pytest.raises(ValueError, match="`grad` is null"):
        pool.adamw(at, at, at, 0, 8, step)
    with pytest.raises(ValueError, match="`remainder` is null"):
        pool.adamw(at, at, at, at, 8, step, remainder=0)
    for call in (
        lambda: pool.sum_squares(0, 8),
        lambda: pool.accumulate(at, 0, 8),
        lambda: pool.cast(0, DType.BF16, at, DType.F32, 8),
        lambda: pool.split(at, 0, at, 8),
        lambda: pool.join(at, at, 0, 8),
        lambda: pool.copy(at, 0, 8),
    ):
        with pytest.raises(ValueError, match="is null"):
            call()


def test_bad_counts_types_and_numbers_are_refused(pool):
    at = torch.zeros(8).data_ptr()
    with pytest.raises(ValueError, match="-1"):
        pool.copy(at, at, -1)
    with pytest.raises(ValueError, match="`dtype` is 7"):
        pool.sum_squares(at, 8, 7)
    with pytest.raises(ValueError, match="`copy_dtype` is 0"):
        pool.adamw(at, at, at, at, 8, AdamWStep(lr=0.1, step=1), copy=at, copy_dtype=DType.F32)
    with pytest.raises(ValueError, match="no `copy`"):
        pool.adamw(at, at, at, at, 8, AdamWStep(lr=0.1, step=1), copy=at, remainder=at)
    with pytest.raises(ValueError, match="`step` is 0"):
        pool.adamw(at, at, at, at, 8, AdamWStep(lr=0.1, step=0))
    with pytest.raises(ValueError, match="betas"):
        pool.adamw(at, at, at, at, 8, AdamWStep(lr=0.1, beta2=1.0, step=1))


def test_nothing_to_do_finishes_at_once(pool):
    assert pool.copy(0, 0, 0).done()
    ticket, result = pool.sum_squares(0, 0)
    ticket.wait(LIMIT_S)
    assert (result.sum, result.nonfinite) == (0.0, 0)
    gate = Signal()
    later = pool.copy(0, 0, 0, after=[gate])
    assert not later.done()
    gate.set()
    later.wait(LIMIT_S)


def test_bad_pools_are_refused():
    with pytest.raises(ValueError, match="threads"):
        WorkerPool(0)
    for core in (4000, 1_000_000, -1):
        with pytest.raises(ValueError, match=f"core {core}"):
            WorkerPool(2, cores=[core])


def test_unknown_instruction_set_is_refused():
    before = isa()
    with pytest.raises(ValueError, match="sse9"):
        select_isa("sse9")
    assert isa() == before


# ---- threads ---------------------------------------------------------------------------------------------------------


def pool_threads():
    """Also those that are ending: the kernel lists a thread for a moment after it was joined."""
    found = set()
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # it has ended meanwhile
            if (task / "comm").read_text().strip() == "unwall-pool":
                found.add(int(task.name))
    return found


def wait_until(condition):
    end = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < end, "the condition did not come true in time"
        time.sleep(0.001)


def test_threads_are_bound_to_the_cores():
    before, allowed = pool_threads(), sorted(os.sched_getaffinity(0))
    with WorkerPool(cores=allowed[-1:]) as pool:
        assert pool.threads == 1
        (thread,) = pool_threads() - before
        assert os.sched_getaffinity(thread) == {allowed[-1]}


def test_close_ends_the_threads_and_the_pool_refuses_work():
    before = pool_threads()
    pool, total = WorkerPool(3), torch.zeros(20 * CHUNK)
    own = pool_threads() - before
    assert len(own) == 3
    pool.throttle(20 * CHUNK * 12 / 0.2)  # two fifths of a second for both: they are under way when it is closed
    tickets = [add(pool, total, torch.ones(20 * CHUNK)) for _ in range(2)]
    pool.close()
    assert all(ticket.done() for ticket in tickets)
    assert (total == 2).all()
    wait_until(lambda: not own & pool_threads())
    pool.close()
    with pytest.raises(RuntimeError, match="closed"):
        pool.copy(0, 0, 0)


def test_close_waits_for_jobs_that_wait():
    pool, gate, total = WorkerPool(1), Signal(), torch.zeros(10)
    ticket = add(pool, total, torch.ones(10), after=[gate])
    closer = threading.Thread(target=pool.close)
    closer.start()
    time.sleep(0.05)
    assert closer.is_alive()
    gate.set()
    closer.join(LIMIT_S)
    assert ticket.done()
    assert total.sum() == 10


def test_a_pool_that_is_dropped_finishes_its_work():
    total = torch.zeros(10 * CHUNK)
    ticket = add(WorkerPool(1), total, torch.ones(10 * CHUNK))
    ticket.wait()
    assert (total == 1).all()


def test_many_threads_submit_at_once(pool):
    totals = [torch.zeros(CHUNK + 1) for _ in range(8)]
    ones, failures = torch.ones(CHUNK + 1), []

    def submit(total):
        try:
            ticket = add(pool, total, ones)
            for _ in range(99):
                ticket = add(pool, total, ones, after=[ticket])
            ticket.wait()
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=submit, args=(total,)) for total in totals]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert all((total == 100).all() for total in totals)


def test_pools_are_created_and_closed_while_others_submit():
    total = torch.zeros(10)
    for _ in range(50):
        pool = WorkerPool(2)
        refused = threading.Event()

        def submit(pool=pool, refused=refused):
            try:
                while True:
                    pool.copy(total.data_ptr(), total.data_ptr(), 0)
            except (RuntimeError, ValueError):
                refused.set()

        thread = threading.Thread(target=submit)
        thread.start()
        pool.close()
        thread.join(LIMIT_S)
        assert refused.is_set()


def test_python_goes_on_while_a_thread_waits(pool):
    n = 20 * CHUNK
    total = torch.zeros(n)
    pool.throttle(1.0)  # the job takes years, unless the other thread runs
    ticket = add(pool, total, torch.ones(n))

    def count():
        for _ in range(50):
            time.sleep(0.001)
        pool.throttle(0)

    counter = threading.Thread(target=count)
    counter.start()
    ticket.wait()
    counter.join()
    assert (total == 1).all()


# ---- throttle --------------------------------------------------------------------------------------------------------


@pytest.mark.clock
def test_throttle_limits_jobs_one_by_one_and_together(pool):
    n = 10 * CHUNK
    source, target = torch.zeros(n), torch.empty(n)
    pool.throttle(n * 8 / 0.2)
    start = time.monotonic()
    for ticket in [pool.copy(target.data_ptr(), source.data_ptr(), n * 4) for _ in range(2)]:
        ticket.wait()
    assert 0.38 < time.monotonic() - start < 1.5
    start = time.monotonic()
    small = [pool.copy(target.data_ptr(), source.data_ptr(), n // 10 * 4) for _ in range(10)]
    for ticket in small:
        ticket.wait()
    assert 0.18 < time.monotonic() - start < 1.0


def test_throttle_off_wakes_those_that_sleep(pool):
    source, target = torch.zeros(CHUNK), torch.empty(CHUNK)
    pool.throttle(1.0)
    ticket = pool.copy(target.data_ptr(), source.data_ptr(), CHUNK * 4)
    with pytest.raises(TimeoutError):
        ticket.wait(0.05)
    pool.throttle(0)
    ticket.wait(LIMIT_S)
    with pytest.raises(ValueError, match="bytes_per_second"):
        pool.throttle(-1)


# ---- fork ------------------------------------------------------------------------------------------------------------


def in_child(check):
    """Runs ``check`` in a forked child and gives its exit code; a hang ends with a signal."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            signal.alarm(LIMIT_S)
            check()
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_a_forked_child_is_refused_and_can_make_its_own_pool(pool):
    total, ones = torch.zeros(4), torch.ones(4)

    def check():
        with pytest.raises(RuntimeError, match="after a fork"):
            add(pool, total, ones)
        record = ErrorRecord()
        native = function(
            "uw_copy", Handle, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64,
            ctypes.POINTER(Handle), ctypes.c_int32, ctypes.POINTER(ErrorRecord),
        )  # fmt: skip
        address = total.data_ptr()
        assert native(pool._handle, address, address, 4, None, 0, ctypes.byref(record)) == 0
        assert b"after a fork" in record.message
        pool.close()
        if "tsan" in os.environ.get("LD_PRELOAD", ""):  # the thread sanitizer cannot start threads in a forked child
            return
        with WorkerPool(1) as own:
            add(own, total, ones).wait(LIMIT_S)
        assert total.sum() == 4

    assert in_child(check) == 0
    assert total.sum() == 0
    add(pool, total, ones).wait()
