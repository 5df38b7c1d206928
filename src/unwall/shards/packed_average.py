"""Averages over replicas that travel as blocks of small integers (``Plan.reduce_dtype`` of "int8" or "int4").

[Note: packed averages]
Every replica holds a gradient of the same shard and wants the average. With two or three of them each packs its own, gets the
packed ones of all, and adds them up in fp32 and in the order of the ranks. With more, that would be too many bytes: then each
averages one part of it and all gather the parts, in the dtype that the gradient is held in. Either way all replicas come to the
same bits. Noise and feedback: see [Note: packed sums] and [Note: feedback] in shards/packed_reduce.py.
"""

import torch

from unwall.shards.collectives import Ranks
from unwall.shards.compress import Codec
from unwall.shards.compress_torch import BLOCK
from unwall.tiers.sizes import align_up

FEW = 3
"""So many replicas get everything of each other: (N - 1) packed copies are fewer bytes than one packed and one in 16 bits."""


class PackedAverage:
    """How replicas average. See [Note: packed averages]."""

    def __init__(self, ranks: Ranks, codec: Codec) -> None:
        self._ranks = ranks
        self._codec = codec
        self._pieces = 1 if ranks.size <= FEW else ranks.size

    def nbytes(self, numel: int, dtype: torch.dtype, feedback: bool) -> int:
        """Device memory that an average of so many elements takes meanwhile, with the values and the residual themselves."""
        padded = align_up(numel, BLOCK * self._pieces)
        packed = self._codec.packed_bytes(padded)
        arriving = packed * self._ranks.size if self._pieces == 1 else packed + 2 * padded * dtype.itemsize
        return numel * dtype.itemsize + 4 * padded + (4 * (padded + numel) if feedback else 0) + packed + arriving

    def average(self, values: torch.Tensor, seed: int, residual: torch.Tensor | None = None) -> torch.Tensor:
        """The average of the replicas' ``values``, on their device. ``residual``, in fp32: is added first, and holds what the
        rounding has left of the sum afterwards."""
        numel = values.numel()
        wide = self._padded(values)
        rest = None if residual is None else self._padded(residual)
        packed = torch.empty(self._codec.packed_bytes(wide.numel()), dtype=torch.uint8, device=wide.device)
        self._codec.pack(packed, wide, self._pieces, seed, rest)
        if residual is not None and rest is not None:
            residual.copy_(rest[:numel])
        total = self._from_all(packed, wide) if self._pieces == 1 else self._in_parts(packed, wide, values.dtype)
        return total[:numel]

    def _padded(self, values: torch.Tensor) -> torch.Tensor:
        """A copy in fp32, in whole blocks for every piece."""
        padded = torch.zeros(align_up(values.numel(), BLOCK * self._pieces), device=self._ranks.device)
        padded[: values.numel()].copy_(values)
        return padded

    def _from_all(self, packed: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
        size = self._ranks.size
        every = packed.new_empty(size * packed.numel())
        self._ranks.all_gather(every, packed).wait()
        self._count(every)
        self._codec.add(total, every, size, size)
        return total

    def _in_parts(self, packed: torch.Tensor, total: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        size = self._ranks.size
        received = torch.empty_like(packed)
        self._ranks.exchange(received, packed).wait()
        part = total[: total.numel() // size]  # what was packed is not needed any more
        self._codec.add(part, received, size, size)
        found = torch.empty(total.numel(), dtype=dtype, device=total.device)
        self._ranks.all_gather(found, part.to(dtype)).wait()
        self._count(packed)
        self._count(found)
        return found

    def _count(self, whole: torch.Tensor) -> None:
        self._ranks.traffic.reduced_bytes += self._ranks.from_others(whole.nbytes)
