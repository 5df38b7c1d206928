"""Blocks of the disk tier as they were at one moment, while the tier goes on to write into them.

[Note: clones]
A clone is one file without a name per drive, which shares extents with the tier's file (``FICLONERANGE``: XFS, btrfs).
Sharing takes no time and moves no byte. From then on the file system puts what is written to a shared extent elsewhere, so the
clone keeps the old bytes. That takes room on the drive which the tier had not reserved: it is counted against the budget, and a
clone is made only where half of what the drives have free would do. The offsets in both files are the same, so whatever reads
blocks of the tier can read them from the clone. The file goes when it is closed, however the process ends.

``copy_file_range`` is no way to make one. Where a file system shares extents for it, it does for ``FICLONERANGE``; elsewhere it
moves every byte through the page cache before the caller may go on (ext4: a tenth of the drive's speed), which a reader that
lets each block go when it has read it does not.
"""

import errno
import fcntl
import os
import struct
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path

from unwall.native import interrupts
from unwall.native.disk import DiskEngine, DiskFile
from unwall.native.ticket import NativeTicket
from unwall.tiers.block import DiskBlock
from unwall.tiers.extents import Extent
from unwall.tiers.ledger import Ledger
from unwall.tiers.sizes import align_up

FICLONERANGE = 0x4020940D
"""``_IOW(0x94, 13, struct file_clone_range)`` of linux/fs.h."""

CANNOT = (errno.EOPNOTSUPP, errno.ENOTTY, errno.ENOSYS, errno.EXDEV, errno.EINVAL, errno.EPERM, errno.EISDIR)
"""What a file system says that cannot share extents, cannot share them at multiples of a page, or makes no file without a name
(EISDIR)."""


class DiskClone:
    """See [Note: clones]. Made by ``DiskTier.clone``."""

    charged_bytes = 0
    """What the ledger counts for it."""

    def __init__(self, ledger: Ledger, engine: DiskEngine, file: DiskFile) -> None:
        self._ledger = ledger
        self._engine = engine
        self._file = file

    def read(self, block: DiskBlock, offset: int, address: int, nbytes: int, keep: object = None) -> list[NativeTicket]:
        """As ``DiskTier.read``, of what the block held when the clone was made."""
        pieces = block.pieces(offset, align_up(nbytes))
        return [self._file.read(part.offset, address + position, part.nbytes, keep=(keep,)) for part, position in pieces]

    def __del__(self) -> None:
        """Of one that nobody has closed: an interrupt came before anyone had it. Its engine closes itself."""
        if self.charged_bytes:
            with interrupts.finalizing:
                self._ledger.abandon(self.charged_bytes)

    def close(self) -> None:
        """Requests that are under way end well."""
        self._engine.close()
        self._ledger.discharge(self)


def share(ledger: Ledger, descriptors: Sequence[int], paths: Sequence[Path], stripe: int, extents: list[Extent]) -> DiskClone:
    """A clone of ``extents`` of the file that is striped over ``descriptors``. OSError where that cannot be."""
    with ExitStack() as opened:
        copies: list[int] = []
        for source, path, parts in zip(descriptors, paths, striped(extents, len(descriptors), stripe), strict=True):
            copy = os.open(path.parent, os.O_RDWR | os.O_TMPFILE | os.O_CLOEXEC, 0o600)
            opened.callback(os.close, copy)
            copies.append(copy)
            os.ftruncate(copy, os.fstat(source).st_size)
            for part in parts:
                fcntl.ioctl(copy, FICLONERANGE, struct.pack("qQQQ", source, part.offset, part.nbytes, part.offset))
        engine = DiskEngine()  # of its own: the tier may be closed before the clone is read
        try:
            names = [f"{path} (snapshot)" for path in paths]
            file = engine.open(names, stripe_bytes=stripe, create=False, descriptors=copies, warn=False)
        except BaseException:
            engine.close()
            raise
        return DiskClone(ledger, engine, file)


def striped(extents: Iterable[Extent], files: int, stripe: int) -> list[list[Extent]]:
    """Where extents of a file lie that is striped over so many, neighbours joined. As the library does it."""
    found: list[list[Extent]] = [[] for _ in range(files)]
    for extent in sorted(extents):
        offset = extent.offset
        while offset < extent.end:
            number, within = divmod(offset, stripe)
            end = extent.end if files == 1 else min(extent.end, offset + stripe - within)
            start = offset if files == 1 else number // files * stripe + within
            parts = found[number % files]
            if parts and parts[-1].end == start:
                parts[-1] = Extent(parts[-1].offset, parts[-1].nbytes + end - offset)
            else:
                parts.append(Extent(start, end - offset))
            offset = end
    return found
