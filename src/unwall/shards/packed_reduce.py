"""Sums of gradients that travel as blocks of small integers (``Plan.reduce_dtype`` of "int8" or "int4").

[Note: packed sums]
Every rank packs its gradient in one piece for each rank, the pieces are exchanged, and each rank adds up those for its shard,
in fp32 and in the order of the ranks. Packing rounds with noise: rounding to nearest would lose everything that is small beside
the largest element of its block, in every step again. The noise is made of the step, the reductions since, the group, the rank
and the element, so a step that is run again comes to the same bits.

[Note: feedback]
With ``Plan.reduce_feedback`` a rank keeps what the rounding has left and adds it to its next gradient. That is as large as its
whole gradient, whatever the stage. Only parameters with a gradient take part: the others send zeros, and keep what they have.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from unwall.shards.accumulate import Accumulator
from unwall.shards.collectives import Collective
from unwall.shards.compress import Codec, seed_of
from unwall.shards.reduce import Memory, Reducer, Reduction
from unwall.tiers.block import MemoryBlock


@dataclass
class Rounds:
    """What changes in a group's packed sums from one to the next."""

    step: int = -1
    number: int = 0
    """Reductions since the step, or since gradients were forgotten."""
    residual: MemoryBlock | None = None
    """See [Note: feedback]."""

    def next(self, step: int) -> int:
        self.number = self.number + 1 if step == self.step else 1
        self.step = step
        return self.number


@dataclass(frozen=True, kw_only=True)
class PackedReducer(Reducer):
    """See [Note: packed sums]."""

    codec: Codec
    feedback: bool = False
    rounds: Rounds = field(default_factory=Rounds)

    def __post_init__(self) -> None:
        if any(param.requires_grad for param in self.group.params):
            self._residual()  # now, when it is known whether all fits

    @property
    def nbytes(self) -> int:
        return super().nbytes + 2 * self._packed_bytes

    @property
    def residual_bytes(self) -> int:
        """Device memory of what is fed back."""
        return self.group.layout.padded_numel * self.dtype.itemsize if self.feedback else 0

    @property
    def _packed_bytes(self) -> int:
        """What is sent to all ranks, and what comes from all of them."""
        return self.codec.packed_bytes(self.group.layout.shard_numel) * self.ranks.size

    def collectives(self, memory: Memory) -> list[Callable[[], Collective]]:
        def exchange() -> Collective:
            whole, part = memory(self._packed_bytes, self._packed_bytes, torch.uint8)
            return self.ranks.exchange(part, whole)

        return [exchange, *self._gathering(memory)]

    def forgotten(self) -> None:
        self.rounds.number = 0

    def _begin(self, own: Accumulator | None, taken: list[MemoryBlock]) -> Reduction:
        layout = self.group.layout
        incoming = self._allocate(layout.shard_numel, taken)
        whole = self._allocate(layout.padded_numel, taken) if self.everywhere else None
        label = f"gradients of {self.group.name} on their way"
        blocks = [self.device.allocate(self._packed_bytes, label) for _ in range(2)]
        taken += blocks
        received, sent = (block.view(torch.uint8) for block in blocks)
        flat = self._pack(sent, own)
        reduction = Reduction(self.device, self.dtype, incoming, flat, served=False)

        def add() -> None:
            self.codec.add(incoming.view(self.dtype), received, self.ranks.size, self.ranks.size if self.mean else 1)
            for block in blocks:
                self.device.free(block)

        reduction.work = self.ranks.exchange(received, sent, add)
        self._count(self._packed_bytes)
        del taken[-2:]  # they go when the sum is there
        if whole is not None:
            self._gather(reduction, whole)
            self.device.free(incoming)
        return reduction

    def _pack(self, sent: torch.Tensor, own: Accumulator | None) -> MemoryBlock | None:
        """What this rank sends. Gives the flat buffer that it was made of."""
        number = self.rounds.next(self.ranks.steps)
        if own is None:
            sent.zero_()
            return None
        flat = own.complete()
        seed = seed_of(self.ranks.steps, number, self.group.index, self.ranks.rank)
        residual = self._residual()
        aside = [] if residual is None else self._set_aside(residual, own.arrived)
        with self.device.noting(sum(values.nbytes for _, values in aside), f"residuals of {self.group.name} set aside"):
            self.codec.pack(sent, flat.view(self.dtype), self.ranks.size, seed, residual)
            for place, values in aside:
                place.copy_(values)
        return flat

    def _residual(self) -> torch.Tensor | None:
        if not self.feedback:
            return None
        if self.rounds.residual is None:
            label = f"what rounding left of the gradients of {self.group.name}"
            self.rounds.residual = self.device.allocate(self.residual_bytes, label)
            self.rounds.residual.data.zero_()
        return self.rounds.residual.view(self.dtype)

    def _set_aside(self, residual: torch.Tensor, arrived: set[int]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """The residuals of parameters without a gradient are zeros meanwhile."""
        found = []
        for index, slot in enumerate(self.group.layout.slots):
            if index not in arrived:
                place = residual[slot.offset : slot.end]
                found.append((place, place.clone()))
                place.zero_()
        return found
