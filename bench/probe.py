"""What this machine's memory, link and disk do, measured in a few seconds: ``python -m bench.probe [--disk DIR]`` prints JSON.

A process of its own, so that the suite itself never holds the device.
"""

import argparse
import contextlib
import json
import mmap
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

_ROUNDS = 5
_DISK_BLOCK_BYTES, _DISK_BLOCKS, _DISK_THREADS = 8 << 20, 64, 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--disk", type=Path)
    parser.add_argument("--bytes", type=int, default=0, help="size of the tensors that are copied; 0: by the number of cores")
    options = parser.parse_args()
    nbytes = options.bytes or min(1 << 30, (64 << 20) * len(os.sched_getaffinity(0)))  # beyond the caches, and soon done
    found = {"host_bytes_per_s": host(nbytes)}
    if torch.cuda.is_available():
        found |= links(nbytes)
    if options.disk:
        found |= disk(options.disk)
    print(json.dumps(found))


def host(nbytes: int) -> float:
    """Bytes read and written per second by all cores together: the best of a copy, an addition, and unwall's own update."""
    a, b, c = (torch.ones(nbytes // 4) for _ in range(3))
    found = [2 * nbytes / _best(lambda: a.copy_(b)), 3 * nbytes / _best(lambda: torch.add(a, b, out=c))]
    with contextlib.suppress(Exception):  # not installed, or not built: then without it
        from unwall.planner.measure import update_rate

        found.append(update_rate(torch.get_num_threads()))
    return max(found)


def links(nbytes: int) -> dict[str, float]:
    pinned, device = (
        torch.empty(nbytes, dtype=torch.uint8, pin_memory=True),
        torch.empty(nbytes, dtype=torch.uint8, device="cuda"),
    )

    def copy(target: torch.Tensor, source: torch.Tensor) -> None:
        target.copy_(source, non_blocking=True)
        torch.cuda.synchronize()

    return {
        "host_to_device_bytes_per_s": nbytes / _best(lambda: copy(device, pinned)),
        "device_to_host_bytes_per_s": nbytes / _best(lambda: copy(pinned, device)),
    }


def disk(folder: Path) -> dict[str, float]:
    """Past the page cache, eight requests at a time: written, read, and both at once in all (half of the file each). One round
    of each: a disk is slow, and a bound needs no more than its size."""
    path = folder / "probe"
    try:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
    except OSError:  # some file systems know no O_DIRECT; then there is no honest figure
        return {}
    try:
        buffers = [mmap.mmap(-1, _DISK_BLOCK_BYTES) for _ in range(_DISK_BLOCKS)]
        for buffer in buffers:
            buffer.write(os.urandom(4096) * (_DISK_BLOCK_BYTES // 4096))
        total = _DISK_BLOCKS * _DISK_BLOCK_BYTES
        with ThreadPoolExecutor(_DISK_THREADS) as pool:

            def all_blocks(*moves: Callable[[int, list[mmap.mmap], int], int]) -> float:
                start = time.perf_counter()
                jobs = [
                    pool.submit(moves[i % len(moves)], handle, [buffer], i * _DISK_BLOCK_BYTES)
                    for i, buffer in enumerate(buffers)
                ]
                for job in jobs:
                    job.result()
                return total / (time.perf_counter() - start)

            return {
                "disk_write_bytes_per_s": all_blocks(os.pwritev),
                "disk_read_bytes_per_s": all_blocks(os.preadv),
                "disk_both_bytes_per_s": all_blocks(os.preadv, os.pwritev),
            }
    except OSError:
        return {}
    finally:
        os.close(handle)
        path.unlink()


def _best(work: Callable[[], object]) -> float:
    work()  # the first touch of the memory is not what is measured
    seconds = []
    for _ in range(_ROUNDS):
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


if __name__ == "__main__":
    main()
