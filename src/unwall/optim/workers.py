"""The native workers that this process updates and measures host memory with."""

import os

import torch

from unwall.native.pool import WorkerPool

_pools: dict[int, WorkerPool] = {}  # by process: a forked child needs its own


def shared_pool() -> WorkerPool:
    """One pool a process, with as many threads as torch uses."""
    pid = os.getpid()
    if pid not in _pools:
        _pools[pid] = WorkerPool(torch.get_num_threads())
    return _pools[pid]
