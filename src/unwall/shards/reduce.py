"""The average of a group's gradient over the ranks.

Each rank sends its flat buffer and gets the average of its shard; at stage 0 the shards are gathered again, so that every rank
has all of it. A rank that only serves another's wish sends zeros. A rank alone has its average at once.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from unwall.shards.accumulate import Accumulator
from unwall.shards.collectives import Collective, Ranks
from unwall.shards.group import Group
from unwall.tiers.block import MemoryBlock
from unwall.tiers.device import DeviceTier

Memory = Callable[[int, int, torch.dtype], tuple[torch.Tensor, torch.Tensor]]
"""Gives memory for what all ranks have and for one rank's part, by their elements."""


class Reduction:
    """A sum over the ranks in flight. It owns what is ``sent`` and what arrives until it is ``release``d or ``discard``ed."""

    def __init__(
        self, device: DeviceTier, dtype: torch.dtype, incoming: MemoryBlock, sent: MemoryBlock | None, *, served: bool
    ) -> None:
        self.incoming = incoming
        """The average, after ``wait``."""
        self.work: Collective | None = None
        self.divisor = 1
        """What makes an average of the sum that ``work`` brings."""
        self._device = device
        self._dtype = dtype
        self._sent = sent
        self._served = served
        """Only zeros were sent."""

    @property
    def has_flat(self) -> bool:
        """Whether ``release`` gives a flat buffer back."""
        return self._sent is not None and not self._served

    def wait(self) -> None:
        """``incoming`` is the average from now on. May be called again."""
        if self.work is None:
            return
        self.work.wait()
        self.work = None
        if self.divisor != 1:
            self.incoming.view(self._dtype).div_(self.divisor)

    def release(self) -> MemoryBlock | None:
        """After ``wait``: ``incoming`` is the caller's, and so is the flat buffer that this gives back, if it was sent."""
        if self.work is not None:
            raise RuntimeError(f"'{self.incoming.label}' are released, but still on their way over the ranks: wait first")
        if self._sent is not None and self._served:
            self._device.free(self._sent)
        return self._sent if self.has_flat else None

    def discard(self) -> None:
        """Nobody wants it any more. The exchange runs to its end, and all memory is freed."""
        if self.work is not None:
            self.work.wait()
        if self._sent is not None:
            self._device.free(self._sent)
        self._device.free(self.incoming)


@dataclass(frozen=True)
class Reducer:
    """Starts the reductions of one group. ``dtype``: what gradients travel in. ``everywhere``: see stage 0 above."""

    group: Group
    device: DeviceTier
    ranks: Ranks
    dtype: torch.dtype
    everywhere: bool
    mean: bool = True
    """Otherwise the sum stays one."""

    @property
    def nbytes(self) -> int:
        """Device memory that a reduction takes beside the flat buffer."""
        if self.ranks.size == 1:
            return 0
        layout = self.group.layout
        return (layout.shard_numel + (layout.padded_numel if self.everywhere else 0)) * self.dtype.itemsize

    def collectives(self, memory: Memory) -> list[Callable[[], Collective]]:
        """What a reduction consists of, in its order, to be called with values that mean nothing (shards/feign.py)."""

        def scatter() -> Collective:
            whole, part = memory(self.group.layout.padded_numel, self.group.layout.shard_numel, self.dtype)
            return self.ranks.reduce_scatter(part, whole)

        return [scatter, *self._gathering(memory)]

    def _gathering(self, memory: Memory) -> list[Callable[[], Collective]]:
        def gather() -> Collective:
            whole, part = memory(self.group.layout.padded_numel, self.group.layout.shard_numel, self.dtype)
            return self.ranks.all_gather(whole, part)

        return [gather] if self.everywhere else []

    def forgotten(self) -> None:
        """The gradients since the step were forgotten."""

    def begin(self, own: Accumulator | None) -> Reduction:
        """Sends what this rank has accumulated, whose memory belongs to the reduction from now on, or zeros.

        If it raises, nothing was taken: what can fail for lack of memory comes first.
        """
        if self.ranks.size == 1:
            assert own is not None, "a rank alone has nobody to serve"
            flat = own.complete()
            own.handed_over()
            return Reduction(self.device, self.dtype, flat, None, served=False)
        taken: list[MemoryBlock] = []
        try:
            reduction = self._begin(own, taken)
        except BaseException:
            for block in taken:
                self.device.free(block)
            raise
        if own is not None:
            own.handed_over()
        return reduction

    def _begin(self, own: Accumulator | None, taken: list[MemoryBlock]) -> Reduction:
        """``taken``: gets what is freed if this fails."""
        layout = self.group.layout
        incoming = self._allocate(layout.shard_numel, taken)
        whole = self._allocate(layout.padded_numel, taken) if self.everywhere else None
        sent = self._allocate(layout.padded_numel, taken) if own is None else own.complete()
        if own is None:
            sent.data.zero_()
        reduction = Reduction(self.device, self.dtype, incoming, sent, served=own is None)
        halves = self.mean and self.dtype is torch.float16
        if halves:
            sent.view(self.dtype).div_(self.ranks.size)  # before the sum: fp16 overflows early
        reduction.divisor = 1 if halves or not self.mean else self.ranks.size
        try:
            reduction.work = self.ranks.reduce_scatter(incoming.view(self.dtype), sent.view(self.dtype))
            self._count(sent.nbytes)
            if whole is not None:  # here, not when it is waited for: every rank must call collectives in the same order
                self._gather(reduction, whole)
        except BaseException:
            if halves:
                sent.view(self.dtype).mul_(self.ranks.size)
            raise
        if whole is not None:
            self.device.free(incoming)
        return reduction

    def _gather(self, reduction: Reduction, whole: MemoryBlock) -> None:
        """Waits for this rank's part and starts to gather all parts."""
        reduction.wait()
        self._count(whole.nbytes)
        part, reduction.incoming = reduction.incoming, whole
        reduction.work, reduction.divisor = self.ranks.all_gather(whole.view(self.dtype), part.view(self.dtype)), 1

    def _count(self, whole_bytes: int) -> None:
        self.ranks.traffic.reduced_bytes += self.ranks.from_others(whole_bytes)
        self.ranks.traffic.reduced_far_bytes += self.ranks.from_far(whole_bytes)

    def _allocate(self, numel: int, taken: list[MemoryBlock]) -> MemoryBlock:
        taken.append(self.device.allocate(numel * self.dtype.itemsize, f"gradients of {self.group.name}"))
        return taken[-1]
