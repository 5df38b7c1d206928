"""Asynchronous disk requests: files on one or several drives, read and written by native threads."""

import ctypes
import os
import threading
import warnings
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

from unwall.native import interrupts
from unwall.native.at_exit import ends_at_exit
from unwall.native.library import ErrorRecord, Handle, NativeError, function, tickets_array
from unwall.native.ticket import NativeTicket

Backend = Literal["auto", "uring", "threads"]
Operation = Literal["read", "write"]
StrPath = str | os.PathLike[str]

ALIGNMENT_BYTES = 4096
"""Offset, address and length of a request are multiples of this."""

_BACKENDS: dict[str, int] = {"threads": 0, "uring": 1}
_OPERATIONS: dict[str, int] = {"read": 1, "write": 2}
_Record = ctypes.POINTER(ErrorRecord)
_Tickets = ctypes.POINTER(Handle)

_warned_directories: set[Path] = set()


class _Options(ctypes.Structure):
    """``uw_disk_options`` of unwall.h."""

    _fields_ = [
        ("backend", ctypes.c_int32),
        ("threads", ctypes.c_int32),
        ("depth", ctypes.c_int32),
        ("queue_blocks", ctypes.c_int32),
        ("block_bytes", ctypes.c_int64),
    ]


def has_uring() -> bool:
    """True where the library was built with liburing and this kernel lets us use it."""
    return bool(function("uw_disk_has_uring", ctypes.c_int)() == 1)


def _operation(name: str) -> int:
    if name not in _OPERATIONS:
        raise ValueError(f"op is {name!r}, expected 'read' or 'write'")
    return _OPERATIONS[name]


def _int32(name: str, value: int) -> int:
    """ctypes would silently drop the upper bits."""
    if not 0 <= value < 2**31:
        raise ValueError(f"{name} is {value}, expected 0 to {2**31 - 1}")
    return value


def _warn_buffered(paths: Sequence[str]) -> None:
    for directory in dict.fromkeys(Path(path).parent.absolute() for path in paths):
        if directory not in _warned_directories:
            _warned_directories.add(directory)
            warnings.warn(
                f"the file system of {directory} refuses O_DIRECT (or that of another part of the same striped file does): "
                "unwall reads and writes through the page cache there, which is slower and uses host memory",
                RuntimeWarning,
                stacklevel=4,
            )


def _covered_bytes(sizes: Sequence[int], stripe_bytes: int) -> int:
    """The logical size of files of these sizes: up to the first byte that one of them lacks. As the library computes it."""
    if len(sizes) == 1:
        return sizes[0]
    return min(
        (size // stripe_bytes * len(sizes) + index) * stripe_bytes + size % stripe_bytes for index, size in enumerate(sizes)
    )


class DiskFile:
    """A logical file, striped over one or several physical ones. Made by :meth:`DiskEngine.open`."""

    def __init__(self, engine: "DiskEngine", file_id: int, paths: tuple[str, ...], size_bytes: int, direct: bool) -> None:
        self._engine = engine
        self._id = file_id
        self.paths = paths
        self.size_bytes = size_bytes
        self.direct = direct
        """True where all physical files are open with O_DIRECT."""

    def read(
        self, offset: int, address: int, length: int, after: Sequence[NativeTicket] = (), keep: Sequence[Any] = ()
    ) -> NativeTicket:
        """Reads ``length`` bytes at ``offset`` into memory at ``address``, once the tickets in ``after`` have finished.

        Blocks only while the engine's queue is full. The returned ticket keeps ``keep`` alive until the work has ended;
        the caller keeps the memory alive through it. A ValueError or NativeError here means that nothing was queued.
        """
        return self._submit("read", offset, address, length, after, keep)

    def write(
        self, offset: int, address: int, length: int, after: Sequence[NativeTicket] = (), keep: Sequence[Any] = ()
    ) -> NativeTicket:
        """Writes ``length`` bytes from memory at ``address`` to ``offset``; otherwise like :meth:`read`."""
        return self._submit("write", offset, address, length, after, keep)

    def resize(self, size_bytes: int) -> None:
        """Grows the file (reserving the space) or cuts it. Requests in flight past a cut are the caller's mistake."""
        record = ErrorRecord()
        call = function("uw_disk_resize", ctypes.c_int, ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64, _Record)
        if call(self._engine._live(), self._id, size_bytes, ctypes.byref(record)) < 0:
            raise record.exception()
        self.size_bytes = size_bytes

    def close(self) -> None:
        """Refuses new requests. Those already submitted finish; the descriptors close after the last one."""
        record = ErrorRecord()
        call = function("uw_disk_close_file", ctypes.c_int, ctypes.c_void_p, ctypes.c_int32, _Record)
        if call(self._engine._live(), self._id, ctypes.byref(record)) < 0:
            raise record.exception()

    def _submit(
        self, op: Operation, offset: int, address: int, length: int, after: Sequence[NativeTicket], keep: Sequence[Any]
    ) -> NativeTicket:
        record = ErrorRecord()
        call = function(
            "uw_disk_submit",
            Handle,
            ctypes.c_void_p,
            ctypes.c_int32,
            ctypes.c_int32,
            ctypes.c_int64,
            ctypes.c_void_p,
            ctypes.c_int64,
            _Tickets,
            ctypes.c_int32,
            _Record,
        )
        tickets, n_tickets = tickets_array([ticket.handle for ticket in after])
        engine = self._engine._live()
        handle = call(engine, _OPERATIONS[op], self._id, offset, address, length, tickets, n_tickets, ctypes.byref(record))
        if handle == 0:
            raise record.exception()
        return NativeTicket(handle, keep=(self, *keep))


class DiskEngine:
    """Reads and writes files in the background.

    Requests are cut into blocks of ``block_bytes``; up to ``depth`` of them are in flight (with threads: at most
    ``threads``) and up to ``queue_blocks`` wait, beyond which a submit blocks. ``backend`` "auto" takes io_uring where the
    library and the kernel have it. An engine belongs to the process that made it: after a fork the child makes its own.
    """

    def __init__(
        self,
        backend: Backend = "auto",
        threads: int = 16,
        depth: int = 32,
        queue_blocks: int = 1024,
        block_bytes: int = 1 << 20,
    ) -> None:
        self._handle: int | None = None
        self._owner = os.getpid()
        self._lock = threading.Lock()
        if backend != "auto" and backend not in _BACKENDS:
            raise ValueError(f"backend is {backend!r}, expected 'auto', 'uring' or 'threads'")
        self._backend = ("uring" if has_uring() else "threads") if backend == "auto" else backend
        options = _Options(
            _BACKENDS[self._backend],
            _int32("threads", threads),
            _int32("depth", depth),
            _int32("queue_blocks", queue_blocks),
            block_bytes,
        )
        record = ErrorRecord()
        call = function("uw_disk_create", ctypes.c_void_p, ctypes.POINTER(_Options), _Record)
        handle = call(ctypes.byref(options), ctypes.byref(record))
        if not handle:
            raise record.exception()
        self._handle = handle
        ends_at_exit(self, disk=True)
        self._direct = True

    @property
    def backend(self) -> str:
        """The backend that runs: "uring" or "threads"."""
        return self._backend

    @property
    def direct(self) -> bool:
        """True while every file opened so far has O_DIRECT."""
        return self._direct

    def open(
        self,
        paths: StrPath | Sequence[StrPath],
        size_bytes: int = 0,
        stripe_bytes: int = 4 << 20,
        create: bool = True,
        descriptors: Sequence[int] | None = None,
        warn: bool = True,
    ) -> DiskFile:
        """Opens one logical file striped over ``paths`` (one per drive) in units of ``stripe_bytes``.

        ``size_bytes`` is reserved on disk at once, so a full disk is met here; 0 takes the files as they are. A missing
        file is created when ``create`` says so. Falls back to buffered access, with one warning per directory unless
        ``warn`` is off, where the file system refuses O_DIRECT.

        ``descriptors``: the files, open already (one for each path). Then these are used, whatever the paths mean by now.
        Without them a path that is a symbolic link is refused.
        """
        names = [os.fspath(paths)] if isinstance(paths, str | os.PathLike) else [os.fspath(path) for path in paths]
        if any("\0" in name for name in names):
            raise ValueError(f"a path has a null character in it: {names}")
        record, direct = ErrorRecord(), ctypes.c_int32()
        call = function(
            "uw_disk_open",
            ctypes.c_int,
            ctypes.c_void_p,
            ctypes.POINTER(ctypes.c_char_p),
            ctypes.POINTER(ctypes.c_int32),
            ctypes.c_int32,
            ctypes.c_int64,
            ctypes.c_int64,
            ctypes.c_int32,
            ctypes.POINTER(ctypes.c_int32),
            _Record,
        )
        array = (ctypes.c_char_p * len(names))(*[os.fsencode(name) for name in names])
        held = None if descriptors is None else (ctypes.c_int32 * len(names))(*descriptors)
        arguments = (len(names), stripe_bytes, size_bytes, int(create), ctypes.byref(direct), ctypes.byref(record))
        file_id = call(self._live(), array, held, *arguments)
        if file_id < 0:
            raise record.exception()
        if not direct.value:
            self._direct = False
            if warn:
                _warn_buffered(names)
        sizes = [os.stat(file).st_size for file in (names if descriptors is None else descriptors)]
        return DiskFile(self, file_id, tuple(names), size_bytes or _covered_bytes(sizes, stripe_bytes), bool(direct.value))

    def pending(self) -> int:
        """Blocks waiting or in flight now."""
        return self._checked(function("uw_disk_pending", ctypes.c_int64, ctypes.c_void_p)(self._live()))

    def inject_fault(self, op: Operation, skip: int, count: int, errno: int) -> None:
        """For tests: after ``skip`` more blocks of ``op``, ``count`` blocks fail with ``errno`` without touching the disk."""
        call = function(
            "uw_disk_fault", ctypes.c_int, ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64, ctypes.c_int64, ctypes.c_int32
        )
        if skip < 0 or count < 0 or errno <= 0:
            raise ValueError(f"skip {skip} and count {count} must not be negative, errno {errno} must be positive")
        self._checked(call(self._live(), _operation(op), skip, count, errno))

    def throttle(self, op: Operation, bytes_per_second: float) -> None:
        """For tests: slows blocks of ``op`` down to this speed in all; 0 is full speed. The other op is not slowed."""
        call = function("uw_disk_throttle", ctypes.c_int, ctypes.c_void_p, ctypes.c_int32, ctypes.c_double)
        if not bytes_per_second >= 0:
            raise ValueError(f"bytes_per_second is {bytes_per_second}, expected 0 or more")
        self._checked(call(self._live(), _operation(op), bytes_per_second))

    def close(self) -> None:
        """Finishes what is in flight and closes the files. Requests still waiting for others fail. Twice is fine.

        In a forked child this does nothing: the engine is the parent's.
        """
        if os.getpid() != self._owner:
            return
        with self._lock:
            handle, self._handle = self._handle, None
        if handle is not None:
            function("uw_disk_close", ctypes.c_int, ctypes.c_void_p)(handle)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    end = close

    def __del__(self) -> None:
        try:
            with interrupts.finalizing:
                self.close()
        except (TypeError, AttributeError):  # the interpreter is shutting down, or __init__ failed early
            pass

    def _live(self) -> int:
        """The native handle. The library checks again: between this and the call another thread may close."""
        if os.getpid() != self._owner:
            raise NativeError(f"this disk engine belongs to process {self._owner}; create a new one after fork")
        handle = self._handle
        if handle is None:
            raise NativeError("this disk engine is closed")
        return handle

    @staticmethod
    def _checked(code: int) -> int:
        if code < 0:
            raise NativeError(f"the disk engine refused the call: {os.strerror(-code)}")
        return code
