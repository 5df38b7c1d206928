"""The host tier: exact-size memory, page-locked on request."""

import contextlib
import os
from pathlib import Path
from typing import Any

import torch

from unwall.native.interrupts import Gone
from unwall.native.memory import HostMemory
from unwall.native.pool import DType, WorkerPool
from unwall.tiers.block import Block, MemoryBlock, check_size
from unwall.tiers.ledger import Ledger, TierName
from unwall.tiers.sizes import format_bytes

DTYPES = {torch.float32: DType.F32, torch.bfloat16: DType.BF16, torch.float16: DType.F16}
"""What the native kernels call torch's dtypes."""


class HostTier:
    """Host memory with an account. Blocks are exactly as large as asked (to the page), zeroed, and touched in parallel.

    ``pinned`` blocks are page-locked through the CUDA runtime where an accelerator is present, so that copies to and from
    the device run asynchronously and at the link's full speed; elsewhere the flag means nothing. Only what crosses the link
    needs it.
    """

    name: TierName = "host"

    def __init__(self, pool: WorkerPool | None = None, budget_bytes: int | None = None) -> None:
        self.ledger = Ledger("host", budget_bytes)
        self.pool = pool
        """The workers that touch fresh memory; whoever works on host memory may use them, too."""

    def allocate(self, nbytes: int, label: str = "", pinned: bool = False, touch: bool = True) -> "HostBlock":
        """Without ``touch`` a page is brought in at the first write to it."""
        check_size(nbytes, self.name)
        pinned = pinned and torch.cuda.is_available()
        block = HostBlock(self.ledger, nbytes, label, None, pinned)
        self.ledger.charge(block, nbytes, label)
        try:
            memory = HostMemory(nbytes, self.pool if touch else None)
            buffer = memory.buffer()
            if pinned:
                _page_lock(buffer, memory.address, nbytes)
            block.fill(torch.frombuffer(buffer, dtype=torch.uint8))
        except BaseException:
            self.ledger.discharge(block)
            raise
        return block

    def free(self, block: Block) -> None:
        block.mark_freed(self.ledger)
        self.ledger.discharge(block)

    def close(self) -> None:
        """Nothing to do: memory goes with its blocks."""


class HostBlock(MemoryBlock):
    """Host memory with an address that native code and O_DIRECT can use (page-aligned)."""

    def __init__(self, ledger: Ledger, nbytes: int, label: str, data: torch.Tensor | None, pinned: bool) -> None:
        super().__init__(ledger, nbytes, label, data)
        self.pinned = pinned

    @property
    def address(self) -> int:
        return self.data.data_ptr()


def available_bytes() -> int:
    """Host memory that could be taken now without pushing anything out, within the limit of this process's control group."""
    found = _meminfo_bytes("MemAvailable")
    for limit, usage in (("memory.max", "memory.current"), ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes")):
        with contextlib.suppress(OSError, ValueError):
            allowed = int(Path("/sys/fs/cgroup", limit).read_text())
            used = int(Path("/sys/fs/cgroup", usage).read_text())
            found = min(found, allowed - used) if allowed < 1 << 60 else found
    return max(0, found)


def spare_bytes(ledger: Ledger) -> int:
    """What the host could hold beyond what is needed: what the budget leaves or, without one, all but a fifth of the memory."""
    free = ledger.free_bytes
    if free is not None:
        return free
    return max(0, available_bytes() - _meminfo_bytes("MemTotal") // 5) // local_ranks()


def local_ranks() -> int:
    """Ranks that share this machine (torchrun says so)."""
    return max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def _meminfo_bytes(field: str) -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) << 10
    raise OSError(f"/proc/meminfo has no {field}")


def _page_lock(buffer: Any, address: int, nbytes: int) -> None:
    """Locks the pages for as long as ``buffer`` lives: a copy in flight holds it, even when its block was freed."""
    runtime = torch.cuda.cudart()
    code = int(runtime.cudaHostRegister(address, nbytes, 0))
    if code != 0:
        raise RuntimeError(
            f"page-locking {format_bytes(nbytes)} of host memory failed with CUDA error {code}; "
            "lower host_bytes or raise `ulimit -l`"
        )
    # Called before the buffer lets go of the mapping. At exit the process goes, and the locks with it.
    Gone(buffer, runtime.cudaHostUnregister, address).atexit = False
