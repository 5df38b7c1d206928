"""Checksums over bytes: CRC-32, which several threads compute at the speed of memory.

[Note: checked runs]
A file is written and verified in blocks of ``BLOCK_BYTES``, each by whichever thread is free. So each tensor in it has one
checksum for every block of the file that it touches: it ends where the tensor or the block ends. Which runs these are follows
from the tensor's place in the file alone.
"""

import zlib
from collections.abc import Iterator
from typing import Any

BLOCK_BYTES = 16 << 20


def crc(data: Any, value: int = 0) -> int:
    """Of anything with the buffer protocol; ``value``: of what came before it. Other threads run meanwhile."""
    return zlib.crc32(data, value)


def checked_runs(start: int, nbytes: int, block_bytes: int = BLOCK_BYTES) -> Iterator[tuple[int, int]]:
    """Offset and length of each run with a checksum of its own. See [Note: checked runs]."""
    end = start + nbytes
    while start < end:
        stop = min(end, (start // block_bytes + 1) * block_bytes)
        yield start, stop - start
        start = stop
