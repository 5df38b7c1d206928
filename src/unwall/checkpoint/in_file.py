"""A file that is read in large runs, through the page cache or past it."""

import contextlib
import errno
import os
from pathlib import Path

import torch

from unwall.checkpoint.validation import open_file
from unwall.native.memory import HostMemory
from unwall.tiers.sizes import ALIGNMENT, align_up


class EndedError(Exception):
    """The file is shorter than it should be."""

    def __init__(self, at: int) -> None:
        super().__init__(f"ends at byte {at}")
        self.at = at


HUGE_PAGE_BYTES = 2 << 20


class Bounce:
    """Memory for one read past the page cache, of at most ``nbytes`` anywhere in a file. At least a huge page: a drive that
    is given hundreds of small ones for a read takes several times as long."""

    def __init__(self, nbytes: int) -> None:
        memory = HostMemory(max(align_up(nbytes) + ALIGNMENT, HUGE_PAGE_BYTES))
        self.bytes = torch.frombuffer(memory.buffer(), dtype=torch.uint8)
        self.view = memoryview(memory.buffer()).cast("B")


class InFile:
    """Any thread may read."""

    def __init__(self, path: Path) -> None:
        self._cached = open_file(path)
        self._direct: int | None = None
        with contextlib.suppress(OSError):  # not on every file system
            self._direct = open_file(path, os.O_RDONLY | os.O_DIRECT)

    def close(self) -> None:
        """Nobody reads any more."""
        os.close(self._cached)
        if self._direct is not None:
            os.close(self._direct)

    def fill(self, offset: int, view: memoryview) -> None:
        """Bytes from ``offset`` on, through the page cache."""
        while view:
            got = os.preadv(self._cached, [view], offset)
            if got == 0:
                raise EndedError(offset)
            view, offset = view[got:], offset + got

    def fetch(self, offset: int, nbytes: int, into: Bounce) -> int:
        """The same past the page cache, where the file system allows it. Gives where in ``into`` the first byte is."""
        if self._direct is not None:
            try:
                self._fetch(self._direct, offset // ALIGNMENT * ALIGNMENT, offset + nbytes, into.view)
                return offset % ALIGNMENT
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
        self.fill(offset, into.view[:nbytes])
        return 0

    @staticmethod
    def _fetch(descriptor: int, low: int, high: int, view: memoryview) -> None:
        while low < high:
            got = os.preadv(descriptor, [view[: align_up(high) - low]], low)
            if low + got < high and (got == 0 or got % ALIGNMENT):  # part of a page: the file's last one
                raise EndedError(low + got)
            view, low = view[got:], low + got
