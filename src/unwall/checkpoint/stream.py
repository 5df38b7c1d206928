"""A file that is written from its first byte to its last through a few buffers, with the checksums of what is in it.

[Note: bounded]
What the caller appends is copied into a buffer of ``BLOCK_BYTES`` and checked on the way, in one pass over memory. A full
buffer goes to native threads, which write it, past the page cache where the file system allows it, while the next one is
filled. There are ``BUFFERS`` of them, whatever the file's size. Beside training that matters: of each 16 MiB the interpreter
sees a few calls, and waits for none of them.
"""

import errno
import os
from collections import deque
from pathlib import Path

import torch

from unwall.checkpoint.checksums import BLOCK_BYTES
from unwall.native.checksum import crc32_copy, crc32_join
from unwall.native.disk import DiskEngine
from unwall.native.library import DiskError
from unwall.native.memory import HostMemory
from unwall.native.ticket import NativeTicket
from unwall.tiers.sizes import align_up, format_bytes

BUFFERS = 6
IN_FLIGHT = 4


class _Buffer:
    """One block of the file on its way."""

    def __init__(self) -> None:
        self.memory = HostMemory(BLOCK_BYTES)
        self.bytes = torch.frombuffer(self.memory.buffer(), dtype=torch.uint8)
        self.filled = 0


class OutStream:
    """See [Note: bounded]. ``nbytes``: of the whole file, known from the start, reserved on the drive at once."""

    def __init__(self, path: Path, nbytes: int) -> None:
        self.path = path
        self.nbytes = nbytes
        self.crcs: dict[int, list[int]] = {}
        """The checksums of each piece, by its number. See [Note: checked runs] in checksums.py."""
        self._written = 0
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
        self._engine = DiskEngine("threads", threads=IN_FLIGHT, depth=IN_FLIGHT, block_bytes=BLOCK_BYTES)
        try:
            self._file = self._engine.open(path, align_up(nbytes), descriptors=[self._descriptor], warn=False)
        except OSError as error:
            failed = self._failed(error)
            self.close()
            raise failed from error
        self._free = [_Buffer() for _ in range(BUFFERS)]
        self._under_way: deque[tuple[_Buffer, NativeTicket]] = deque()
        self._current = self._free.pop()
        self._start = 0  # of the current buffer, in the file
        self._piece: int | None = None

    def append(self, data: tuple[torch.Tensor, ...], piece: int | None = None) -> None:
        """Further elements (a flat tensor in host memory, or the two halves of a split master), of a numbered piece or,
        without a number, of none."""
        at, numel = 0, data[0].numel()
        item = sum(part.element_size() for part in data)
        while at < numel:
            if BLOCK_BYTES - self._current.filled < item:
                self._split_element(data, at, piece)
                at += 1
                continue
            taken = min(numel - at, (BLOCK_BYTES - self._current.filled) // item)
            self._put(tuple(part[at : at + taken] for part in data), piece)
            at += taken

    def _split_element(self, data: tuple[torch.Tensor, ...], at: int, piece: int | None) -> None:
        """An element that begins in one block of the file and ends in the next, or begins the next."""
        if len(data) == 2:
            one = torch.empty(1, dtype=torch.float32)
            crc32_join(one.data_ptr(), data[0][at:].data_ptr(), data[1][at:].data_ptr(), 1)
        else:
            one = data[0][at : at + 1]
        raw = one.view(torch.uint8)
        first = min(BLOCK_BYTES - self._current.filled, raw.numel())
        if first:
            self._put((raw[:first],), piece)
        self._send()
        if first < raw.numel():
            self._put((raw[first:],), piece)

    def _put(self, data: tuple[torch.Tensor, ...], piece: int | None) -> None:
        """Elements that fit into the current buffer."""
        buffer = self._current
        crcs = [0] if piece is None else self.crcs.setdefault(piece, [])
        if piece is not None and (piece != self._piece or not buffer.filled):
            crcs.append(0)
        self._piece = piece
        target = buffer.memory.address + buffer.filled
        numel = data[0].numel()
        if len(data) == 2:
            half, rest = data
            crcs[-1] = crc32_join(target, half.data_ptr(), rest.data_ptr(), numel, crcs[-1])
            buffer.filled += 4 * numel
        else:
            crcs[-1] = crc32_copy(target, data[0].data_ptr(), data[0].nbytes, crcs[-1])
            buffer.filled += data[0].nbytes

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
        self._check_name()

    def _check_name(self) -> None:
        """OSError where the path does not lead to what was written: somebody removed it, perhaps with its directory."""
        try:
            there = os.path.samestat(os.fstat(self._descriptor), os.lstat(self.path))
        except FileNotFoundError:
            there = False
        if not there:
            raise FileNotFoundError(errno.ENOENT, "the file was removed while it was written", str(self.path))

    def close(self) -> None:
        """Lets go of file and buffers, whatever is written by then."""
        self._engine.close()
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)
        self._free, self._under_way = [], deque()

    def _send(self) -> None:
        buffer = self._current
        self._under_way.append((buffer, self._write(buffer)))
        self._start += buffer.filled
        self._current = self._free.pop() if self._free else self._take_back()

    def _take_back(self) -> _Buffer:
        """The oldest buffer under way, once it is written."""
        buffer, ticket = self._under_way.popleft()
        try:
            ticket.wait()
        except OSError as error:
            raise self._failed(error) from error
        self._written += buffer.filled
        buffer.filled = 0
        return buffer

    def _write(self, buffer: _Buffer) -> NativeTicket:
        length = align_up(buffer.filled)
        buffer.bytes[buffer.filled : length].zero_()
        return self._file.write(self._start, buffer.memory.address, length, keep=(buffer,))

    def _failed(self, error: OSError) -> OSError:
        """The same error, saying how much is missing."""
        missing = self.nbytes - self._written
        if error.errno == errno.ENOSPC and not self._written:  # the room is reserved before anything is written
            drive = os.fstatvfs(self._descriptor)
            missing = max(missing - drive.f_bavail * drive.f_frsize, 1)
        why = error.reason if isinstance(error, DiskError) else error.strerror
        if error.errno is not None and os.strerror(error.errno) not in str(why):
            why = f"{os.strerror(error.errno)}: {why}"
        what = f"{why}: {format_bytes(missing)} ({missing} bytes) of {format_bytes(self.nbytes)} are missing"
        return OSError(error.errno, what, str(self.path))
