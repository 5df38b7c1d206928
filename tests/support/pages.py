"""Which pages of some memory are in use, and which addresses are mapped."""

import mmap

import numpy as np


def resident(address: int, nbytes: int) -> int:
    """The bytes of these addresses that take memory now, or swap. The process's own total would count what other tests left."""
    pages = -(-nbytes // mmap.PAGESIZE)
    with open("/proc/self/pagemap", "rb") as file:
        file.seek(address // mmap.PAGESIZE * 8)
        entries = np.frombuffer(file.read(pages * 8), dtype=np.uint64)
    return int(((entries >> np.uint64(62)) != 0).sum()) * mmap.PAGESIZE


def mapped() -> list[tuple[int, int]]:
    """Begin and end of all that is mapped, in order. What a thread's allocator merely reserves does not count."""
    with open("/proc/self/maps") as file:
        ranges = [line.split()[0].split("-") for line in file if " ---p " not in line]
    return [(int(begin, 16), int(end, 16)) for begin, end in ranges]


def newly_mapped(before: list[tuple[int, int]], address: int) -> int:
    """The bytes around an address that were mapped since, in one piece. What other threads map elsewhere does not count."""
    low = max((end for _, end in before if end <= address), default=0)
    high = min((begin for begin, _ in before if begin > address), default=1 << 64)
    runs: list[tuple[int, int]] = []
    for begin, end in mapped():
        begin, end = max(begin, low), min(end, high)
        if runs and runs[-1][1] == begin < end:
            runs[-1] = runs[-1][0], end
        elif begin < end:
            runs.append((begin, end))
    return next(end - begin for begin, end in runs if begin <= address < end)
