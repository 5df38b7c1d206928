"""The average of a group's gradient over the ranks.

Each rank sends its flat buffer and gets the average of its shard; at stage 0 the shards are gathered again, so that every rank
has all of it. A rank that only serves another's wish sends zeros. A rank alone has its average at once.
"""

from dataclasses import dataclass

import torch

from unwall.shards.collectives import Ranks, Work
from unwall.shards.group import Group
from unwall.tiers.block import MemoryBlock
from unwall.tiers.device import DeviceTier


class Reduction:
    """A sum over the ranks in flight. It owns what is sent and what arrives until it is ``release``d or ``discard``ed."""

    def __init__(self, device: DeviceTier, incoming: MemoryBlock, dtype: torch.dtype) -> None:
        self.incoming = incoming
        """The average, after ``wait``. Not freed by ``release``."""
        self.flat: MemoryBlock | None = None
        """The flat buffer that was sent."""
        self.zeros: MemoryBlock | None = None
        """What was sent in its place."""
        self.work: Work | None = None
        self.divisor = 1
        """What makes an average of the sum that ``work`` brings."""
        self._device = device
        self._dtype = dtype

    def wait(self) -> None:
        """``incoming`` is the average from now on. May be called again."""
        if self.work is None:
            return
        self.work.wait()
        self.work = None
        if self.divisor != 1:
            self.incoming.view(self._dtype).div_(self.divisor)

    def release(self) -> MemoryBlock | None:
        """After ``wait``: gives the flat buffer back, if it was sent; ``incoming`` is the caller's, too."""
        if self.work is not None:
            raise RuntimeError(f"'{self.incoming.label}' are released, but still on their way over the ranks: wait first")
        if self.zeros is not None:
            self._device.free(self.zeros)
        return self.flat

    def discard(self) -> None:
        """Nobody wants it any more. The exchange runs to its end, and all memory is freed."""
        if self.work is not None:
            self.work.wait()
        for block in (self.flat, self.zeros, self.incoming):
            if block is not None:
                self._device.free(block)


@dataclass(frozen=True)
class Reducer:
    """Starts the reductions of one group. ``dtype``: what gradients travel in. ``everywhere``: see stage 0 above."""

    group: Group
    device: DeviceTier
    ranks: Ranks
    dtype: torch.dtype
    everywhere: bool

    @property
    def nbytes(self) -> int:
        """Device memory that a reduction takes beside the flat buffer."""
        layout = self.group.layout
        numel = layout.shard_numel + (layout.padded_numel if self.everywhere else 0)
        return 0 if self.ranks.size == 1 else numel * self.dtype.itemsize

    def begin(self, flat: MemoryBlock | None) -> Reduction:
        """Sends ``flat``, which belongs to the reduction from now on, or zeros."""
        if self.ranks.size == 1:
            assert flat is not None, "a rank alone has nobody to serve"
            return Reduction(self.device, flat, self.dtype)
        taken = [] if flat is None else [flat]
        try:
            return self._begin(flat, taken)
        except BaseException:
            for block in taken:
                self.device.free(block)
            raise

    def _begin(self, flat: MemoryBlock | None, taken: list[MemoryBlock]) -> Reduction:
        layout, zeros = self.group.layout, None
        if flat is None:
            flat_or_zeros = zeros = self._allocate(layout.padded_numel, taken)
            zeros.data.zero_()
        else:
            flat_or_zeros = flat
        sent = flat_or_zeros.view(self.dtype)
        divisor = self.ranks.size
        if self.dtype is torch.float16:
            sent.div_(divisor)  # before the sum: fp16 overflows early
            divisor = 1
        reduction = Reduction(self.device, self._allocate(layout.shard_numel, taken), self.dtype)
        reduction.flat, reduction.zeros, reduction.divisor = flat, zeros, divisor
        reduction.work = self.ranks.reduce_scatter(reduction.incoming.view(self.dtype), sent)
        if self.everywhere:  # here, not when it is waited for: every rank must call collectives in the same order
            self._gather(reduction, taken)
        return reduction

    def _gather(self, reduction: Reduction, taken: list[MemoryBlock]) -> None:
        """Waits for this rank's part and starts to gather all parts."""
        reduction.wait()
        part, reduction.incoming = reduction.incoming, self._allocate(self.group.layout.padded_numel, taken)
        reduction.work, reduction.divisor = self.ranks.all_gather(reduction.incoming.view(self.dtype), part.view(self.dtype)), 1
        taken.remove(part)
        self.device.free(part)

    def _allocate(self, numel: int, taken: list[MemoryBlock]) -> MemoryBlock:
        taken.append(self.device.allocate(numel * self.dtype.itemsize, f"gradients of {self.group.name}"))
        return taken[-1]
