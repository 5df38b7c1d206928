"""Numbers as they travel between ranks where the plan asks for less than 16 bits of each.

[Note: blocks]
Each 256 elements share one float scale, and are whole numbers of 8 or 4 bits times that: 1.016 or 0.516 bytes per element. What
one rank sends to another is a *piece*: its scales, then its codes. Packing is deterministic: it rounds to nearest, or with
noise that is a function of a seed and of the element's number. Sums are made of unpacked pieces in fp32 and in the order of
the ranks. So all ranks come to the same bits, and so does a run that is repeated.

Packing what was unpacked gives the same codes again: the largest element of a block survives as it is, and rounding the others
to 16 bits moves them by less than half a code.
"""

import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from unwall.native import quantise as native
from unwall.native.pool import WorkerPool
from unwall.shards.compress_device import KERNELS
from unwall.shards.compress_torch import BLOCK, pack_blocks, unpack_blocks
from unwall.tiers.host import DTYPES

PIECE_ELEMENTS = 1 << 22
"""Packed by torch at a time: it needs several temporaries of four and eight bytes per element."""


def travels_packed(dtype: torch.dtype) -> bool:
    """Whether numbers of a dtype may be packed at all. What is kept in fp32 was meant to be exact."""
    return dtype in (torch.bfloat16, torch.float16)


def packed_bytes(numel: int, bits: int) -> int:
    """What ``numel`` elements take as they travel. See [Note: blocks]."""
    return numel // BLOCK * (4 + BLOCK * bits // 8)


def seed_of(*numbers: int) -> int:
    """32 bits for the noise of one packing."""
    return zlib.crc32(",".join(map(str, numbers)).encode())


@dataclass(frozen=True)
class Codec:
    """Packs and unpacks flat tensors. ``pool`` gives the workers that do it in host memory. See [Note: blocks]."""

    bits: int
    pool: Callable[[], WorkerPool]

    def packed_bytes(self, numel: int) -> int:
        return packed_bytes(numel, self.bits)

    def pack(
        self,
        packed: torch.Tensor,
        values: torch.Tensor,
        pieces: int = 1,
        seed: int | None = None,
        residual: torch.Tensor | None = None,
    ) -> None:
        """``values`` in equal ``pieces``. ``seed``: for the noise; None rounds to nearest. ``residual``: is added to the values
        first, and holds what the rounding has left of the sum afterwards."""
        count = values.numel() // pieces
        if values.device.type == "cpu":
            native.quantise(
                self.pool(),
                packed.data_ptr(),
                values.data_ptr(),
                DTYPES[values.dtype],
                count,
                pieces,
                self.bits,
                seed=seed,
                residual=None if residual is None else residual.data_ptr(),
                keep=(packed, values, residual),
            ).wait()
            return
        if values.is_cuda and KERNELS.pack(values.device, packed, values, pieces, self.bits, seed, residual):
            return
        for scales, codes, span in self._parts(packed, count, pieces):
            rest_of = None if residual is None else residual[span]
            pack_blocks(scales, codes, values[span], self.bits, span.start, seed, rest_of)

    def unpack(self, values: torch.Tensor, packed: torch.Tensor, pieces: int = 1) -> None:
        """The inverse of ``pack``, rounded to the dtype of ``values``."""
        count = values.numel() // pieces
        if values.device.type == "cpu":
            address, source, keep = values.data_ptr(), packed.data_ptr(), (packed, values)
            native.dequantise(self.pool(), address, source, DTYPES[values.dtype], count, pieces, self.bits, keep=keep).wait()
            return
        if values.is_cuda and KERNELS.unpack(values.device, values, packed, pieces, 1, self.bits, 1):
            return
        for scales, codes, span in self._parts(packed, count, pieces):
            values[span].copy_(unpack_blocks(scales, codes, self.bits))

    def add(self, total: torch.Tensor, packed: torch.Tensor, pieces: int, divisor: int) -> None:
        """``total`` becomes the sum of the pieces, in fp32 and in their order, over ``divisor``."""
        count, nbytes = total.numel(), self.packed_bytes(total.numel())
        if total.device.type == "cpu":
            address, source, keep, by_ = total.data_ptr(), packed.data_ptr(), (packed, total), float(divisor)
            kind = DTYPES[total.dtype]
            native.dequantise(self.pool(), address, source, kind, count, pieces, self.bits, divisor=by_, keep=keep).wait()
            return
        if total.is_cuda and KERNELS.unpack(total.device, total, packed, 1, pieces, self.bits, divisor):
            return
        by = torch.full((), float(divisor), device=total.device)
        parts = [self._parts(packed[piece * nbytes :], count, 1) for piece in range(pieces)]
        for every in zip(*parts, strict=True):
            sum_ = unpack_blocks(every[0][0], every[0][1], self.bits)
            for scales, codes, _ in every[1:]:
                sum_ += unpack_blocks(scales, codes, self.bits)
            total[every[0][2]].copy_(sum_ if divisor == 1 else sum_.div_(by))

    def _parts(self, packed: torch.Tensor, count: int, pieces: int) -> Iterator[tuple[torch.Tensor, torch.Tensor, slice]]:
        """Scales, codes and elements of a part of a piece, one after the other."""
        nbytes, blocks, width = self.packed_bytes(count), count // BLOCK, BLOCK * self.bits // 8
        for piece in range(pieces):
            scales = packed[piece * nbytes :][: blocks * 4].view(torch.float32)
            codes = packed[piece * nbytes + blocks * 4 :][: blocks * width]
            for start in range(0, count, PIECE_ELEMENTS):
                end = min(count, start + PIECE_ELEMENTS)
                low, high = start // BLOCK, end // BLOCK
                span = slice(piece * count + start, piece * count + end)
                yield scales[low:high], codes[low * width : high * width], span
