"""Where a group's gradient waits for its update when it has left the device: host memory, or the disk.

Both places are kept from one step to the next, because an update may read them after the gradient was forgotten.
"""

import torch

from unwall.shards.collectives import Ranks
from unwall.shards.group import Group
from unwall.shards.store import Store
from unwall.tiers.block import DiskBlock, MemoryBlock
from unwall.tiers.host import DTYPES
from unwall.tiers.tiers import Tiers


class LandingPlace:
    """The place of one group's gradient, which arrives in ``dtype``. Memory is taken at first use."""

    def __init__(self, group: Group, tiers: Tiers, dtype: torch.dtype) -> None:
        self.on_disk = group.home.grads == "disk"
        self._group = group
        self._tiers = tiers
        self._dtype = dtype
        self._block: MemoryBlock | None = None
        self._stores: dict[torch.dtype, Store] = {}

    def memory(self) -> MemoryBlock:
        """On the host."""
        if self._block is None:
            label = f"gradient shard of {self._group.name}"
            self._block = self._tiers.memory("host", self._group.own_numel, self._dtype, label, pinned=True)
        return self._block

    def is_memory(self, block: MemoryBlock) -> bool:
        return block is self._block

    def store(self, dtype: torch.dtype | None = None) -> Store:
        """On disk, for a gradient as it arrives or for a wider sum."""
        dtype = self._dtype if dtype is None else dtype
        for other in self._stores.values():
            if other.dtype is not dtype:
                other.go_back()  # they share their bytes on disk
        if dtype not in self._stores:
            group, label = self._group, f"gradient of group {self._group.name}"
            wider = next(iter(self._stores.values()), None)
            head = None
            if wider is not None:
                block = wider.block
                assert isinstance(block, DiskBlock)
                head = block.head(group.own_numel * dtype.itemsize)
            self._stores[dtype] = Store(self._tiers, group.pending, "disk", group.own_numel, dtype, label, block=head)
        return self._stores[dtype]

    def add(self, stored: Store, incoming: torch.Tensor, ranks: Ranks) -> tuple[Store, torch.Tensor | None]:
        """Adds to what is on disk, in fp32. Gives where the sum is, and its ``square_sum``."""
        dtype = torch.promote_types(self._dtype, torch.float32)
        before = stored.tensor(write=False).to(dtype, copy=True)
        self._group.pending.staging.close()
        if dtype not in self._stores:  # grows into a place of twice the size, of which a first pass later uses the head
            self._stores.pop(self._dtype).free()
        total = self.store(dtype).tensor()
        torch.add(before, incoming.to(total.device), out=total)
        square = square_sum(total, self._group, ranks)
        self._group.pending.staging.close()
        return self.store(dtype), square


def square_sum(own: torch.Tensor, group: Group, ranks: Ranks) -> torch.Tensor | None:
    """Sum of squares of the part of an owned run that this rank alone counts. None where no kernel measures it."""
    layout = group.layout
    part = own.narrow(0, ranks.rank * layout.shard_numel - group.own_start, layout.shard_numel)
    if part.is_cuda:
        norm: torch.Tensor = torch.linalg.vector_norm(part, dtype=torch.float32).double()
        return norm.square()
    if part.dtype not in DTYPES:
        return None
    ticket, result = group.pool.sum_squares(part.data_ptr(), part.numel(), DTYPES[part.dtype], keep=(part,))
    ticket.wait()
    return torch.tensor(result.sum, dtype=torch.float64)
