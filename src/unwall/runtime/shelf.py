"""Where parameters wait that were taken out while their model is built."""

from collections.abc import Sequence
from pathlib import Path

import torch

from unwall.native.interrupts import Gone
from unwall.native.memory import HostMemory
from unwall.tiers.disk import DiskTier
from unwall.tiers.sizes import align_up


class Shelf:
    """Where the parts that were taken out wait: in host memory up to ``limit_bytes``, beyond that on disk."""

    def __init__(self, directories: Sequence[Path] = (), limit_bytes: int | None = None, rank: int = 0) -> None:
        self._directories = directories
        self._limit_bytes = limit_bytes
        self._rank = rank
        self._held_bytes = 0
        self._disk: DiskTier | None = None

    def put(self, part: torch.Tensor) -> "torch.Tensor | Shelved":
        if self._limit_bytes is None or not self._directories or self._held_bytes + part.nbytes <= self._limit_bytes:
            self._held_bytes += part.nbytes
            Gone(part, self._forget, part.nbytes).atexit = False
            return part
        if self._disk is None:
            self._disk = DiskTier(self._directories, rank=self._rank)
        return Shelved(part, self._disk)

    def _forget(self, nbytes: int) -> None:
        self._held_bytes -= nbytes


class Shelved:
    """Bytes that went to disk."""

    def __init__(self, part: torch.Tensor, disk: DiskTier) -> None:
        self._disk = disk
        self._block = disk.allocate(part.nbytes, "a parameter under construction")
        memory = self._memory()
        memory.copy_(part)
        for ticket in disk.write(self._block, 0, memory.data_ptr(), part.nbytes, keep=memory):
            ticket.wait()
        Gone(self, disk.free, self._block).atexit = False

    def get(self) -> torch.Tensor:
        memory = self._memory()
        for ticket in self._disk.read(self._block, 0, memory.data_ptr(), self._block.nbytes, keep=memory):
            ticket.wait()
        return memory

    def _memory(self) -> torch.Tensor:
        """Page-aligned, with room for whole sectors."""
        memory = HostMemory(align_up(self._block.nbytes))
        return torch.frombuffer(memory.buffer(), dtype=torch.uint8)[: self._block.nbytes]
