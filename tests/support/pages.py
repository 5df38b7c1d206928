"""Which pages of some memory are in use."""

import mmap

import numpy as np


def resident(address: int, nbytes: int) -> int:
    """The bytes of these addresses that are in memory now. The process's own total would count what other tests left."""
    pages = -(-nbytes // mmap.PAGESIZE)
    with open("/proc/self/pagemap", "rb") as file:
        file.seek(address // mmap.PAGESIZE * 8)
        entries = np.frombuffer(file.read(pages * 8), dtype=np.uint64)
    return int((entries >> np.uint64(63)).sum()) * mmap.PAGESIZE
