"""The disk engine on a real disk, with both backends."""

import contextlib
import ctypes
import errno
import gc
import mmap
import os
import random
import subprocess
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from unwall.native import disk
from unwall.native.disk import DiskEngine, DiskFile, has_uring
from unwall.native.library import DiskError, ErrorRecord, Handle, NativeError, function
from unwall.native.ticket import NativeTicket, Signal

pytestmark = pytest.mark.usefixtures("no_ticket_left")
KIB, MIB = 1 << 10, 1 << 20
PAGE = 4096
LIMIT_S = 120
"""Far beyond what anything here takes, on a busy machine, too."""
BACKENDS = ["threads", pytest.param("uring", marks=pytest.mark.skipif(not has_uring(), reason="no io_uring here"))]


class Buffer:
    """Page-aligned memory with an address."""

    def __init__(self, length: int, data: bytes = b"") -> None:
        self.map = mmap.mmap(-1, length)
        self.map[: len(data)] = data
        self._view = ctypes.c_char.from_buffer(self.map)
        self.address = ctypes.addressof(self._view)
        self.length = length

    @property
    def data(self) -> bytes:
        return self.map[:]


def write(file: DiskFile, offset: int, data: bytes, **options) -> NativeTicket:
    buffer = Buffer(len(data), data)
    return file.write(offset, buffer.address, len(data), keep=[buffer], **options)


def read_back(file: DiskFile, offset: int, length: int) -> bytes:
    buffer = Buffer(length)
    file.read(offset, buffer.address, length).wait()
    return buffer.data


def wait_until(condition, seconds: float = LIMIT_S) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "the condition did not come true in time"
        time.sleep(0.001)


@pytest.fixture(params=BACKENDS)
def backend(request) -> str:
    return request.param


@pytest.fixture
def engine(backend) -> Iterator[DiskEngine]:
    with DiskEngine(backend, threads=4, depth=8, queue_blocks=64, block_bytes=64 * KIB) as made:
        yield made


@pytest.fixture
def file(engine, tmp_path) -> DiskFile:
    return engine.open(tmp_path / "data", size_bytes=4 * MIB)


@pytest.fixture
def small_tmpfs(tmp_path) -> Iterator[Path]:
    """A file system of 1 MiB."""
    target = tmp_path / "small"
    target.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", target], capture_output=True, text=True)
    if made.returncode != 0:
        pytest.skip(f"mount is not permitted here: {made.stderr.strip()}")
    try:
        yield target
    finally:
        unmount(target)


def unmount(target: Path) -> None:
    """As soon as the kernel has let go of the files, which may be a moment after they were closed."""
    wait_until(lambda: subprocess.run(["umount", target], capture_output=True).returncode == 0)


# ---- transfers ---------------------------------------------------------------------------------------------------------


def test_random_requests_match_a_model(engine, file):
    rng = random.Random(0)
    model = bytearray(file.size_bytes)
    for _ in range(150):
        length = rng.randint(1, 64) * PAGE
        offset = rng.randrange(0, (file.size_bytes - length) // PAGE + 1) * PAGE
        if rng.random() < 0.5:
            data = rng.randbytes(length)
            write(file, offset, data).wait()
            model[offset : offset + length] = data
        else:
            assert read_back(file, offset, length) == model[offset : offset + length]
    assert read_back(file, 0, file.size_bytes) == model
    assert engine.pending() == 0


def test_many_requests_in_flight(file):
    rng = random.Random(1)
    pieces = [rng.randbytes(5 * PAGE) for _ in range(200)]
    tickets = [write(file, index * 5 * PAGE, piece) for index, piece in enumerate(pieces)]
    for ticket in tickets:
        ticket.wait()
    assert read_back(file, 0, 1000 * PAGE) == b"".join(pieces)


def test_stripes_lie_where_the_layout_says(engine, tmp_path):
    stripe = 32 * KIB
    paths = [tmp_path / name / "part" for name in "abc"]
    for path in paths:
        path.parent.mkdir()
    size = 10 * stripe + 2 * PAGE
    data = random.Random(2).randbytes(size)
    file = engine.open(paths, size_bytes=size, stripe_bytes=stripe)
    write(file, 0, data).wait()
    expected = [b"", b"", b""]
    for index in range(11):
        expected[index % 3] += data[index * stripe : (index + 1) * stripe]
    assert [path.read_bytes() for path in paths] == expected
    at = stripe - PAGE
    assert read_back(file, at, 3 * stripe) == data[at : at + 3 * stripe]
    file.close()
    again = engine.open(paths, stripe_bytes=stripe, create=False)
    assert again.size_bytes == size
    assert read_back(again, 0, size) == data
    with pytest.raises(ValueError, match=f"which has {size} bytes"):
        read_back(again, size, PAGE)


@pytest.mark.parametrize("pages", [1, 15, 16, 17, 35])
def test_length_need_not_be_a_multiple_of_the_block(engine, tmp_path, pages):
    data = random.Random(pages).randbytes(pages * PAGE)
    file = engine.open(tmp_path / "odd", size_bytes=40 * PAGE)
    write(file, 3 * PAGE, data).wait()
    assert read_back(file, 0, 40 * PAGE) == bytes(3 * PAGE) + data + bytes((37 - pages) * PAGE)


def test_threads_submit_at_once(file):
    failures: list[str] = []

    def work(number: int) -> None:
        rng = random.Random(number)
        for turn in range(20):
            offset = (number * 20 + turn) * 5 * PAGE
            data = rng.randbytes(5 * PAGE)
            write(file, offset, data).wait()
            if read_back(file, offset, len(data)) != data:
                failures.append(f"thread {number}, turn {turn}")

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_resize(engine, file, tmp_path):
    file.resize(8 * MIB)
    assert (tmp_path / "data").stat().st_size == file.size_bytes == 8 * MIB
    write(file, 7 * MIB, b"x" * MIB).wait()
    assert read_back(file, 7 * MIB, MIB) == b"x" * MIB
    file.resize(MIB)
    assert (tmp_path / "data").stat().st_size == MIB
    with pytest.raises(ValueError, match="past the end of the file"):
        read_back(file, MIB, PAGE)
    with pytest.raises(ValueError, match="size_bytes is 100"):
        file.resize(100)


def test_space_is_reserved_at_open(file, tmp_path):
    assert (tmp_path / "data").stat().st_blocks * 512 >= 4 * MIB


# ---- waiting, order, back-pressure ---------------------------------------------------------------------------------------


@pytest.mark.clock
def test_wait_for_one_ticket_not_for_all(engine, file):
    engine.throttle("write", 512 * KIB)
    slow = write(file, 0, bytes(512 * KIB))
    start = time.monotonic()
    read_back(file, MIB, MIB)
    assert time.monotonic() - start < 0.5
    assert not slow.done()
    slow.wait()
    assert 0.9 < time.monotonic() - start < 5


@pytest.mark.clock
def test_throttle_holds_and_ends(engine, file):
    engine.throttle("read", 2 * MIB)
    start = time.monotonic()
    read_back(file, 0, MIB)
    assert 0.45 < time.monotonic() - start < 2
    engine.throttle("read", 1)
    buffer = Buffer(MIB)
    ticket = file.read(0, buffer.address, MIB)
    with pytest.raises(TimeoutError, match="has not finished"):
        ticket.wait(0.05)
    engine.throttle("read", 0)
    ticket.wait(20)


def test_ticket_times_are_in_order(engine, file):
    engine.throttle("write", MIB)
    ticket = write(file, 0, bytes(128 * KIB))
    ticket.wait()
    submitted, started, finished = ticket.times()
    assert submitted <= started < finished
    assert finished - submitted > 0.1


def test_a_full_queue_blocks_the_submitter(backend, tmp_path):
    with DiskEngine(backend, threads=2, depth=2, queue_blocks=4, block_bytes=PAGE) as engine:
        file = engine.open(tmp_path / "data", size_bytes=MIB)
        returned_early = False
        for _ in range(10):  # until this thread is quick enough to see it
            engine.throttle("write", 1)
            returned, tickets, highest = threading.Event(), [], 0

            def submit(returned: threading.Event = returned, tickets: list[NativeTicket] = tickets) -> None:
                tickets.append(write(file, 0, b"a" * 40 * PAGE))  # ten times the queue: has to go in piece by piece
                returned.set()

            thread = threading.Thread(target=submit)
            thread.start()
            wait_until(lambda: engine.pending() == 4)
            assert not returned.wait(0.2)
            engine.throttle("write", 40 * PAGE)
            while not returned.wait(0.001):
                highest = max(highest, engine.pending())
            thread.join()
            assert highest <= 4 + 2  # the queue and the depth
            returned_early = tickets[0].times()[2] == 0.0  # when the last block went into the queue, not when all was done
            tickets[0].wait()
            assert read_back(file, 0, 40 * PAGE) == b"a" * 40 * PAGE
            if returned_early:
                break
        assert returned_early


def test_a_read_after_a_write_sees_it(engine, file):
    engine.throttle("write", 2 * MIB)
    result, data = Buffer(MIB), random.Random(3).randbytes(MIB)
    first = write(file, 0, data)
    second = file.read(0, result.address, MIB, after=[first])
    third = file.write(MIB, result.address, MIB, after=[second])
    third.wait()
    assert result.data == data
    assert read_back(file, MIB, MIB) == data
    assert first.times()[2] <= second.times()[1]


def test_a_request_that_waits_is_not_in_the_queue(backend, tmp_path):
    with DiskEngine(backend, queue_blocks=1, block_bytes=PAGE) as engine:
        file = engine.open(tmp_path / "data", size_bytes=MIB)
        signal = Signal()
        waiting = [write(file, index * 4 * PAGE, b"w" * 4 * PAGE, after=[signal]) for index in range(8)]
        assert engine.pending() == 0
        write(file, 512 * KIB, b"n" * PAGE).wait(LIMIT_S)
        signal.set()  # queues 32 blocks without blocking, though the queue has room for one
        for ticket in waiting:
            ticket.wait(LIMIT_S)
        assert read_back(file, 0, 32 * PAGE) == b"w" * 32 * PAGE


def test_a_failed_chain_stops(engine, file):
    write(file, 0, b"o" * MIB).wait()
    engine.inject_fault("read", 0, 1, errno.EIO)
    buffer = Buffer(MIB)
    first = file.read(0, buffer.address, MIB)
    second = write(file, 0, b"n" * MIB, after=[first])
    third = write(file, 0, b"n" * MIB, after=[second])
    for ticket in (first, second, third):
        with pytest.raises(DiskError, match="read failed") as caught:
            ticket.wait()
        assert caught.value.errno == errno.EIO
    engine.inject_fault("read", 0, 0, errno.EIO)
    assert read_back(file, 0, MIB) == b"o" * MIB


def test_a_ticket_waited_twice_tells_the_same(engine, file):
    engine.inject_fault("write", 0, 1, errno.EIO)
    bad, good = write(file, 0, bytes(PAGE)), write(file, 0, bytes(PAGE))
    for _ in range(2):
        with pytest.raises(DiskError, match="write failed"):
            bad.wait()
        good.wait()


# ---- faults --------------------------------------------------------------------------------------------------------------


def test_an_error_says_what_and_where(engine, tmp_path):
    paths = [tmp_path / "left", tmp_path / "right"]
    file = engine.open(paths, size_bytes=4 * MIB, stripe_bytes=64 * KIB)
    engine.inject_fault("write", 3, 1, errno.EIO)  # the fourth block: second stripe of the second path
    ticket = write(file, 0, b"x" * MIB)
    with pytest.raises(DiskError, match="write failed: Input/output error") as caught:
        ticket.wait()
    error = caught.value
    assert (error.errno, error.filename, error.offset, error.length) == (errno.EIO, str(paths[1]), 64 * KIB, 64 * KIB)
    assert engine.pending() == 0
    write(file, 0, b"y" * MIB).wait()
    assert read_back(file, 0, MIB) == b"y" * MIB


def test_the_ticket_fails_after_its_last_block(backend, tmp_path):
    with DiskEngine(backend, block_bytes=64 * KIB) as engine:
        file = engine.open(tmp_path / "data", size_bytes=MIB)
        engine.inject_fault("write", 0, 1, errno.ENOSPC)
        engine.throttle("write", 2 * MIB)
        ticket = write(file, 0, bytes(MIB))
        with pytest.raises(DiskError, match="No space left"):
            ticket.wait()
        assert engine.pending() == 0


def test_a_truncated_file_is_an_error_that_says_where_it_ends(file, tmp_path):
    write(file, 0, b"x" * 4 * MIB).wait()
    os.truncate(tmp_path / "data", MIB + 5000)
    assert read_back(file, 0, MIB) == b"x" * MIB
    for offset in (MIB, 2 * MIB):
        with pytest.raises(DiskError, match=f"the file ends at byte {MIB + 5000}") as caught:
            read_back(file, offset, 64 * KIB)
        assert (caught.value.errno, caught.value.offset, caught.value.filename) == (errno.EIO, offset, str(tmp_path / "data"))


def test_a_full_disk_is_met_at_open(engine, small_tmpfs):
    with pytest.raises(DiskError, match="cannot reserve 2097152 bytes: No space left") as caught:
        engine.open(small_tmpfs / "large", size_bytes=2 * MIB)
    assert (caught.value.errno, caught.value.filename) == (errno.ENOSPC, str(small_tmpfs / "large"))
    assert not (small_tmpfs / "large").exists()
    with _buffered_is_fine():
        file = engine.open(small_tmpfs / "fits", size_bytes=512 * KIB)
    with pytest.raises(DiskError, match="cannot reserve 2097152 bytes"):
        file.resize(2 * MIB)
    assert file.size_bytes == (small_tmpfs / "fits").stat().st_size == 512 * KIB
    write(file, 0, b"f" * 512 * KIB).wait()
    assert read_back(file, 0, 512 * KIB) == b"f" * 512 * KIB
    file.close()  # no descriptor is left: the file system can be unmounted


def test_a_disk_that_fills_up_during_a_write(engine, small_tmpfs):
    sparse = small_tmpfs / "sparse"
    with open(sparse, "wb") as made:
        made.truncate(2 * MIB)
    with _buffered_is_fine():
        file = engine.open(sparse)
    with pytest.raises(DiskError, match="write failed: No space left") as caught:
        write(file, 0, b"x" * 2 * MIB).wait()
    assert caught.value.errno == errno.ENOSPC
    file.close()


@contextlib.contextmanager
def _buffered_is_fine() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        yield


def test_a_file_system_without_direct_access(backend, tmp_path):
    """procfs and old tmpfs refuse O_DIRECT; so does ramfs-backed memory: use one that this kernel refuses."""
    target = tmp_path / "ram"
    target.mkdir()
    if subprocess.run(["mount", "-t", "ramfs", "ramfs", target], capture_output=True).returncode != 0:
        pytest.skip("mount is not permitted here")
    try:
        with DiskEngine(backend, block_bytes=64 * KIB) as engine:
            with warnings.catch_warnings(record=True) as seen:
                warnings.simplefilter("always")
                file = engine.open(target / "one", size_bytes=MIB)
                engine.open(target / "two", size_bytes=MIB)
            if file.direct:
                pytest.skip("ramfs takes O_DIRECT on this kernel")
            assert [str(warning.message).count(str(target)) for warning in seen] == [1]
            assert not engine.direct
            write(file, 0, b"b" * MIB).wait()
            assert read_back(file, 0, MIB) == b"b" * MIB
            with pytest.raises(ValueError, match="not a multiple of 4096"):
                file.read(1, Buffer(PAGE).address, PAGE)
    finally:
        disk._warned_directories.discard(target)
        unmount(target)


def test_a_read_only_directory(engine, small_tmpfs):
    remount = ["mount", "-o", "remount,ro", small_tmpfs]
    wait_until(lambda: subprocess.run(remount, capture_output=True).returncode == 0)  # not while the kernel holds a file
    with pytest.raises(DiskError, match="cannot create the file: Read-only file system") as caught:
        engine.open(small_tmpfs / "data", size_bytes=PAGE)
    assert caught.value.errno == errno.EROFS


# ---- what is refused -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("offset", "shift", "length", "message"),
    [
        (1, 0, PAGE, "offset 1 is not a multiple of 4096"),
        (-PAGE, 0, PAGE, "offset -4096 is not"),
        (0, 8, PAGE, "address 0x[0-9a-f]+ is not a multiple of 4096"),
        (0, 0, 1000, "length 1000 is not a multiple of 4096"),
        (0, 0, 0, "length is 0, expected more than 0"),
        (0, 0, -PAGE, "length is -4096, expected more than 0"),
        (4 * MIB, 0, PAGE, "bytes 4194304 to 4198400 lie past the end of the file, which has 4194304 bytes"),
        (4 * MIB - PAGE, 0, 2 * PAGE, "lie past the end"),
        (2**63 - PAGE, 0, PAGE, "lie past the end"),
    ],
)
def test_bad_requests(file, offset, shift, length, message):
    buffer = Buffer(2 * PAGE)
    for submit in (file.read, file.write):
        with pytest.raises(ValueError, match=message):
            submit(offset, buffer.address + shift, length)


def test_bad_operations(engine, file):
    buffer, record = Buffer(PAGE), ErrorRecord()
    submit = function("uw_disk_submit", Handle, *_submit_types())
    arguments = (0, buffer.address, PAGE, None, 0, ctypes.byref(record))
    assert submit(engine._handle, 3, file._id, *arguments) == 0
    assert (record.code, record.message) == (errno.EINVAL, b"op is 3, expected 1 (read) or 2 (write)")
    assert submit(engine._handle, 1, 99, *arguments) == 0
    assert (record.code, record.message) == (errno.EBADF, b"disk file 99 is closed or never existed")
    assert submit(None, 1, 0, *arguments) == 0
    assert record.code == errno.EINVAL
    with pytest.raises(ValueError, match="op is 'erase'"):
        engine.throttle("erase", 0)


def _submit_types() -> list:
    c, pointer = ctypes, ctypes.POINTER
    head = [c.c_void_p, c.c_int32, c.c_int32, c.c_int64, c.c_void_p, c.c_int64]
    return [*head, pointer(Handle), c.c_int32, pointer(ErrorRecord)]


def test_a_made_up_dependency(file):
    class MadeUp:
        handle = 1 << 60

    with pytest.raises(ValueError, match="was released or never existed"):
        write(file, 0, bytes(PAGE), after=[MadeUp()])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"backend": "carrier pigeon"}, "expected 'auto', 'uring' or 'threads'"),
        ({"threads": 0}, "threads is 0"),
        ({"depth": 0}, "depth is 0"),
        ({"depth": -1}, "depth is -1"),
        ({"queue_blocks": 0}, "queue_blocks is 0"),
        ({"block_bytes": 5000}, "block_bytes is 5000, expected a multiple of 4096"),
        ({"block_bytes": 0}, "block_bytes is 0"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ValueError, match=message):
        DiskEngine(**options)


def test_bad_opens(engine, tmp_path):
    path = tmp_path / "data"
    with pytest.raises(ValueError, match="at least one path"):
        engine.open([])
    with pytest.raises(ValueError, match="path 0 of the disk file is empty"):
        engine.open("")
    with pytest.raises(ValueError, match="null character"):
        engine.open("a\0b")
    with pytest.raises(ValueError, match="size_bytes is 5, expected a multiple"):
        engine.open(path, size_bytes=5)
    with pytest.raises(ValueError, match="stripe_bytes is 5"):
        engine.open([path, tmp_path / "other"], stripe_bytes=5)
    with pytest.raises(DiskError, match="No such file") as caught:
        engine.open(tmp_path / "absent" / "data", size_bytes=PAGE)
    assert (caught.value.errno, caught.value.filename) == (errno.ENOENT, str(tmp_path / "absent" / "data"))
    with pytest.raises(DiskError, match="cannot open the file: No such file"):
        engine.open(path, create=False)
    with pytest.raises(OSError, match="Is a directory"):
        engine.open(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_the_same_file_twice_is_refused_and_left_alone(engine, tmp_path):
    path = tmp_path / "data"
    path.write_bytes(b"x" * PAGE)
    with pytest.raises(ValueError, match="given twice"):
        engine.open([path, path], size_bytes=MIB)
    assert path.read_bytes() == b"x" * PAGE


def test_a_failed_striped_open_leaves_nothing_behind(engine, tmp_path):
    kept = tmp_path / "kept"
    kept.write_bytes(b"k" * PAGE)
    with pytest.raises(DiskError, match="No such file"):
        engine.open([kept, tmp_path / "new", tmp_path / "absent" / "data"], size_bytes=12 * MIB)
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]
    assert kept.read_bytes() == b"k" * PAGE


# ---- the end -------------------------------------------------------------------------------------------------------------


def test_a_closed_file(engine, file):
    data = random.Random(4).randbytes(4 * MIB)
    ticket = write(file, 0, data)
    file.close()
    ticket.wait()  # submitted before: it finishes
    with pytest.raises(NativeError, match="is closed or never existed"):
        write(file, 0, bytes(PAGE))
    with pytest.raises(NativeError, match="is closed or never existed"):
        file.close()
    assert read_back(engine.open(file.paths), 0, 4 * MIB) == data


def test_a_closed_engine(backend, tmp_path):
    engine = DiskEngine(backend)
    file = engine.open(tmp_path / "data", size_bytes=MIB)
    handle = engine._handle
    engine.close()
    engine.close()
    calls = [
        lambda: write(file, 0, bytes(PAGE)),
        lambda: file.resize(PAGE),
        file.close,
        lambda: engine.open(tmp_path / "other"),
        engine.pending,
        lambda: engine.throttle("read", 0),
        lambda: engine.inject_fault("read", 0, 0, errno.EIO),
    ]
    for call in calls:
        with pytest.raises(NativeError, match="this disk engine is closed"):
            call()
    # The library itself, past Python's check: an error and no crash.
    assert function("uw_disk_pending", ctypes.c_int64, ctypes.c_void_p)(handle) == -errno.EBADF
    assert function("uw_disk_close", ctypes.c_int, ctypes.c_void_p)(handle) == -errno.EBADF


def test_closing_finishes_what_is_in_flight_and_cancels_what_waits(backend, tmp_path):
    engine = DiskEngine(backend, block_bytes=64 * KIB)
    file = engine.open(tmp_path / "data", size_bytes=4 * MIB)
    engine.throttle("write", 8 * MIB)
    signal = Signal()
    flying = [write(file, index * MIB, bytes([index + 1]) * MIB) for index in range(4)]
    waiting = write(file, 0, bytes(MIB), after=[signal])
    engine.close()
    for ticket in flying:
        ticket.wait(0)  # already finished
    assert not waiting.done()
    signal.set()
    with pytest.raises(DiskError, match="closed before this request could start") as caught:
        waiting.wait()
    assert (caught.value.errno, caught.value.offset, caught.value.length) == (errno.ECANCELED, 0, MIB)
    assert (tmp_path / "data").read_bytes() == b"".join(bytes([index + 1]) * MIB for index in range(4))


def test_closing_while_a_submitter_waits_for_room(backend, tmp_path):
    engine = DiskEngine(backend, queue_blocks=1, block_bytes=PAGE)
    file = engine.open(tmp_path / "data", size_bytes=MIB)
    engine.throttle("write", 1)
    outcome: list[object] = []

    def submit() -> None:
        ticket = write(file, 0, b"z" * MIB)
        ticket.wait()
        outcome.append("finished")

    thread = threading.Thread(target=submit)
    thread.start()
    wait_until(lambda: engine.pending() == 1)
    engine.close()
    thread.join(LIMIT_S)
    assert outcome == ["finished"]
    assert (tmp_path / "data").read_bytes() == b"z" * MIB


def test_calls_race_with_close(backend, tmp_path):
    for _ in range(20):
        engine = DiskEngine(backend, threads=2, block_bytes=PAGE)
        file = engine.open(tmp_path / "data", size_bytes=MIB)
        ended = threading.Event()

        def submit(file: DiskFile = file, ended: threading.Event = ended) -> None:
            with contextlib.suppress(NativeError, DiskError):  # closed at submit, or canceled
                while True:
                    write(file, 0, bytes(4 * PAGE)).wait()
            ended.set()

        threads = [threading.Thread(target=submit) for _ in range(2)]
        for thread in threads:
            thread.start()
        time.sleep(0.002)
        engine.close()
        for thread in threads:
            thread.join(LIMIT_S)
        assert ended.is_set()


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_after_fork_the_child_gets_an_error_and_the_parent_goes_on(engine, file):
    engine.throttle("write", 2 * MIB)
    ticket = write(file, 0, b"p" * MIB)
    child = os.fork()
    if child == 0:
        os._exit(_child_outcome(engine, file))
    end = time.monotonic() + LIMIT_S
    while (status := os.waitpid(child, os.WNOHANG)) == (0, 0):
        assert time.monotonic() < end, "the forked child hangs"
        time.sleep(0.01)
    assert os.waitstatus_to_exitcode(status[1]) == 0
    ticket.wait()
    assert read_back(file, 0, MIB) == b"p" * MIB


def _child_outcome(engine: DiskEngine, file: DiskFile) -> int:
    """Runs in the child: 0 when every call is refused with a clear message, and an engine of its own works."""
    try:
        for call in (engine.pending, file.close, lambda: write(file, 0, bytes(PAGE))):
            try:
                call()
            except NativeError as error:
                if f"belongs to process {os.getppid()}; create a new one after fork" not in str(error):
                    return 2
            else:
                return 3
        record = ErrorRecord()
        call = function("uw_disk_submit", Handle, *_submit_types())
        if call(engine._handle, 1, 0, 0, None, PAGE, None, 0, ctypes.byref(record)) != 0 or b"fork" not in record.message:
            return 4
        if function("uw_disk_close", ctypes.c_int, ctypes.c_void_p)(engine._handle) != -errno.EPERM:
            return 5
        engine.close()
        if "tsan" in os.environ.get("LD_PRELOAD", ""):  # the thread sanitizer cannot start threads in a forked child
            return 0
        with DiskEngine(engine.backend) as own:
            if read_back(own.open(file.paths), MIB, PAGE) != bytes(PAGE):
                return 6
        return 0
    except BaseException:
        return 1


def test_an_engine_dropped_with_work_in_flight(backend, tmp_path):
    engine = DiskEngine(backend, block_bytes=64 * KIB)
    ticket = write(engine.open(tmp_path / "data", size_bytes=4 * MIB), 0, b"d" * 4 * MIB)
    del engine
    gc.collect()
    ticket.wait()
    assert (tmp_path / "data").read_bytes() == b"d" * 4 * MIB


def test_auto_takes_a_backend_that_is_there():
    with DiskEngine() as engine:
        assert engine.backend == ("uring" if has_uring() else "threads")
