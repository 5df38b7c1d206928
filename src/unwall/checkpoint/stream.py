"""A file that is written from its first byte to its last through a few buffers, with the checksums of what is in it.

[Note: bounded]
What the caller appends is copied into a buffer of ``BLOCK_BYTES``, which a thread checks and writes, past the page cache where
the file system allows it, while the next one is filled. There are ``BUFFERS`` of them, whatever the file's size.
"""

import contextlib
import errno
import os
from collections import deque
from concurrent.futures import Future
from functools import partial
from pathlib import Path

import torch

from unwall.checkpoint.checksums import BLOCK_BYTES, crc
from unwall.checkpoint.copying import copy_flat
from unwall.checkpoint.threads import Threads
from unwall.native.memory import HostMemory
from unwall.tiers.sizes import align_up, format_bytes

BUFFERS = 6
THREADS = 4


class _Buffer:
    """One block of the file on its way."""

    def __init__(self) -> None:
        self.memory = HostMemory(BLOCK_BYTES)
        self.bytes = torch.frombuffer(self.memory.buffer(), dtype=torch.uint8)
        self.view = memoryview(self.memory.buffer()).cast("B")
        self.filled = 0
        self.runs: list[tuple[int, int]] = []
        """Number of the piece and where its run begins in the buffer."""


class OutStream:
    """See [Note: bounded]. ``nbytes``: of the whole file, known from the start."""

    def __init__(self, path: Path, nbytes: int) -> None:
        self.path = path
        self.nbytes = nbytes
        self.crcs: dict[int, list[int]] = {}
        """The checksums of each piece, by its number. See [Note: checked runs] in checksums.py."""
        self._descriptor = _create(path)
        self._make_room()
        self._threads = Threads(THREADS, "unwall save")
        self._free = [_Buffer() for _ in range(BUFFERS)]
        self._under_way: deque[tuple[_Buffer, Future[None]]] = deque()
        self._current = self._free.pop()
        self._start = 0  # of the current buffer, in the file
        self._piece: int | None = None

    def _make_room(self) -> None:
        """The file has its size from the start: threads that write behind its end would wait for each other."""
        try:
            os.ftruncate(self._descriptor, align_up(self.nbytes))
        except OSError as error:
            failed = self._failed(error)
            os.close(self._descriptor)
            raise failed from error

    def append(self, data: torch.Tensor, piece: int | None = None) -> None:
        """Further bytes (a flat uint8 tensor on any device), of a numbered piece or, without a number, of none."""
        at = 0
        while at < data.numel():
            if self._current.filled == BLOCK_BYTES:
                self._send()
            buffer = self._current
            if piece is not None and (piece != self._piece or not buffer.filled):
                buffer.runs.append((piece, buffer.filled))
            self._piece = piece
            taken = min(data.numel() - at, BLOCK_BYTES - buffer.filled)
            copy_flat(buffer.bytes[buffer.filled : buffer.filled + taken], data[at : at + taken])
            buffer.filled += taken
            at += taken

    def finish(self) -> None:
        """All of it is on the disk."""
        if self._current.filled:
            self._send()
        while self._under_way:
            self._take_back()
        if self._start != self.nbytes:
            raise RuntimeError(f"{self.path} was to have {self.nbytes} bytes, but {self._start} were written")
        try:
            os.ftruncate(self._descriptor, self.nbytes)
            os.fsync(self._descriptor)
        except OSError as error:
            raise self._failed(error) from error

    def close(self) -> None:
        """Lets go of file and buffers, whatever is written by then."""
        self._threads.close()
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)
        self._free, self._under_way = [], deque()

    def _send(self) -> None:
        buffer, start = self._current, self._start
        for piece, _ in buffer.runs:
            self.crcs.setdefault(piece, []).append(0)
        places = [len(self.crcs[piece]) - 1 for piece, _ in buffer.runs]
        self._under_way.append((buffer, self._threads.submit(partial(self._write, buffer, start, places))))
        self._start += buffer.filled
        self._current = self._free.pop() if self._free else self._take_back()

    def _take_back(self) -> _Buffer:
        """The oldest buffer under way, once it is written."""
        buffer, written = self._under_way.popleft()
        written.result()
        buffer.filled, buffer.runs = 0, []
        if not self._under_way:
            self._free.append(buffer)
            return self._free.pop()
        return buffer

    def _write(self, buffer: _Buffer, start: int, places: list[int]) -> None:
        ends = [*(at for _, at in buffer.runs[1:]), buffer.filled]
        for (piece, at), end, place in zip(buffer.runs, ends, places, strict=True):
            self.crcs[piece][place] = crc(buffer.view[at:end])
        length = align_up(buffer.filled)
        buffer.bytes[buffer.filled : length].zero_()
        try:
            at = 0
            while at < length:
                at += os.pwrite(self._descriptor, buffer.view[at:length], start + at)
        except OSError as error:
            raise self._failed(error) from error

    def _failed(self, error: OSError) -> OSError:
        """The same error, saying how much is missing."""
        with contextlib.suppress(OSError):
            there = os.fstat(self._descriptor).st_blocks * 512
            missing = max(0, self.nbytes - there)
            what = f"{error.strerror}: {format_bytes(missing)} ({missing} bytes) of {format_bytes(self.nbytes)} are missing"
            return OSError(error.errno, what, str(self.path))
        return error


def _create(path: Path) -> int:
    """A new file, past the page cache where the file system allows it."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        return os.open(path, flags | os.O_DIRECT, 0o644)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    with contextlib.suppress(FileNotFoundError):  # some file systems refuse it when the file is there already
        path.unlink()
    return os.open(path, flags, 0o644)
