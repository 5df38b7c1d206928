"""The native workers that this process updates and measures host memory with."""

import os

import torch

from unwall.native.pool import WorkerPool

_pools: dict[int, WorkerPool] = {}  # by process: a forked child needs its own


def shared_pool() -> WorkerPool:
    """One pool per process, with as many threads as torch uses; beside an accelerator two fewer, which keep it fed."""
    pid = os.getpid()
    if pid not in _pools:
        threads = torch.get_num_threads()
        _pools[pid] = WorkerPool(threads - 2 if threads > 4 and torch.cuda.is_available() else threads)
    return _pools[pid]
