"""The blocks of shards/compress.py made by Triton, one pass over memory. Imported only where there is an accelerator.

[Note: the same bits] in shards/compress_torch.py holds here, too: the operations and their order are those of
native/cpp/quantise_impl.hpp. So a product and a sum are never made one operation (``enable_fp_fusion``), divisions round as
IEEE says (``div_rn``), and the sum of pieces begins with the first of them, not with zero.

A program works on some blocks of one piece, and on both halves of them apart: with 4 bits, elements ``i`` and ``i + 128`` share
a byte.
"""

import torch
import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]

from unwall.shards.compress_torch import BLOCK, SMALLEST, most_of

_ROWS = 8
"""Blocks per program: 32 elements for each of 64 threads."""


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _noise(number, seed):  # type: ignore[no-untyped-def]
    """From 0 to 1, for elements by their number. All of it is exact."""
    x = number.to(tl.uint32)
    x = (x ^ (x >> 16)) * 0x045D9F3B
    x = x ^ seed.to(tl.uint32, bitcast=True)
    x = (x ^ (x >> 16)) * 0x045D9F3B
    x = (x ^ (x >> 16)) * 0x045D9F3B
    return (x >> 16).to(tl.int32).to(tl.float32) * 0.0000152587890625 + 0.00000762939453125


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _magnitude(values):  # type: ignore[no-untyped-def]
    """As bits, which are ordered as the numbers are. From 0x7F800000 on a number is not finite."""
    return values.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _codes(values, inverse, number, seed, NOISE: tl.constexpr, MOST: tl.constexpr):  # type: ignore[no-untyped-def]
    """Whole numbers of what is finite; zero is what is not."""
    clean = tl.where(_magnitude(values) < 0x7F800000, values, 0.0)
    chance = 0.5
    if NOISE:
        chance = _noise(number, seed)
    found = tl.floor(clean * inverse + chance).to(tl.int32)
    return tl.minimum(tl.maximum(found, -MOST), MOST)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _marked(codes, values):  # type: ignore[no-untyped-def]
    """With the codes of what is not finite, of 8 bits."""
    bits = values.to(tl.int32, bitcast=True)
    special = tl.where(_magnitude(values) > 0x7F800000, -128, tl.where(bits > 0, 127, -127))
    return tl.where(_magnitude(values) < 0x7F800000, codes, special)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _left(values, codes, scale, broken, BITS: tl.constexpr):  # type: ignore[no-untyped-def]
    """What rounding has left of the values."""
    rest = tl.where(_magnitude(values) < 0x7F800000, values - codes.to(tl.float32) * scale, 0.0)
    if BITS == 4:
        rest = tl.where(broken, 0.0, rest)
    return rest


@triton.jit(do_not_specialize=["seed"])  # type: ignore[untyped-decorator,unused-ignore]
def _pack(  # type: ignore[no-untyped-def]
    packed, scales, values, residual, blocks, seed,
    BITS: tl.constexpr, MOST: tl.constexpr, LEAST: tl.constexpr, NOISE: tl.constexpr, FEEDS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    piece = tl.program_id(1).to(tl.int64)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, 128)
    inside = (row < blocks)[:, None] & (column < 128)[None, :]
    low = (piece * blocks + row)[:, None] * 256 + column[None, :]
    high = low + 128
    first = tl.load(values + low, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(values + high, mask=inside, other=0.0).to(tl.float32)
    if FEEDS:
        first = first + tl.load(residual + low, mask=inside, other=0.0).to(tl.float32)
        second = second + tl.load(residual + high, mask=inside, other=0.0).to(tl.float32)
    sizes, others = _magnitude(first), _magnitude(second)
    most = tl.maximum(tl.max(sizes, 1), tl.max(others, 1))
    broken = most >= 0x7F800000
    sizes, others = tl.where(sizes < 0x7F800000, sizes, 0), tl.where(others < 0x7F800000, others, 0)
    largest = tl.maximum(tl.max(sizes, 1), tl.max(others, 1)).to(tl.float32, bitcast=True)
    counts = largest >= LEAST
    divided = tl.where(counts, largest, 1.0)
    whole = tl.full([ROWS], MOST, tl.float32)
    scale = tl.where(counts, tl.div_rn(divided, whole), 0.0)
    inverse = tl.where(counts, tl.div_rn(whole, divided), 0.0)[:, None]
    codes = _codes(first, inverse, low, seed, NOISE, MOST)
    upper = _codes(second, inverse, high, seed, NOISE, MOST)
    if FEEDS:
        rest = _left(first, codes, scale[:, None], broken[:, None], BITS)
        other = _left(second, upper, scale[:, None], broken[:, None], BITS)
        tl.store(residual + low, rest.to(residual.dtype.element_ty), mask=inside)
        tl.store(residual + high, other.to(residual.dtype.element_ty), mask=inside)
    width = 32 * BITS
    at = (piece * blocks * (width + 4) + blocks * 4 + row * width)[:, None] + column[None, :]
    if BITS == 8:
        tl.store(packed + at, _marked(codes, first).to(tl.int8), mask=inside)
        tl.store(packed + at + 128, _marked(upper, second).to(tl.int8), mask=inside)
    else:
        tl.store(packed + at, ((codes & 15) | ((upper & 15) << 4)).to(tl.int8), mask=inside)
        scale = tl.where(broken, 0x7FC00000, scale.to(tl.int32, bitcast=True)).to(tl.float32, bitcast=True)
    tl.store(scales + piece * blocks * (width // 4 + 1) + row, scale, mask=row < blocks)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _shown(codes, scale):  # type: ignore[no-untyped-def]
    """The values of codes of 8 bits."""
    values = codes.to(tl.float32) * scale
    values = tl.where(codes == 127, float("inf"), values)
    values = tl.where(codes == -127, float("-inf"), values)
    return tl.where(codes == -128, float("nan"), values)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _unpacked(packed, scales, piece, row, column, inside, blocks, BITS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Both halves of some blocks of one piece."""
    width = 32 * BITS
    scale = tl.load(scales + piece * blocks * (width // 4 + 1) + row, mask=row < blocks, other=0.0)[:, None]
    at = (piece * blocks * (width + 4) + blocks * 4 + row * width)[:, None] + column[None, :]
    codes = tl.load(packed + at, mask=inside, other=0).to(tl.int32)
    if BITS == 8:
        upper = tl.load(packed + at + 128, mask=inside, other=0).to(tl.int32)
        first, second = _shown(codes, scale), _shown(upper, scale)
    else:
        first = (((codes & 15) ^ 8) - 8).to(tl.float32) * scale
        second = ((((codes >> 4) & 15) ^ 8) - 8).to(tl.float32) * scale
    return first, second


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _unpack(  # type: ignore[no-untyped-def]
    values, packed, scales, blocks, pieces, divisor,
    BITS: tl.constexpr, DIVIDES: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    target = tl.program_id(1).to(tl.int64)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, 128)
    inside = (row < blocks)[:, None] & (column < 128)[None, :]
    start = target * pieces
    first, second = _unpacked(packed, scales, start, row, column, inside, blocks, BITS)
    for further in range(1, pieces):
        more, beside = _unpacked(packed, scales, start + further, row, column, inside, blocks, BITS)
        first = first + more
        second = second + beside
    if DIVIDES:
        by = tl.zeros([ROWS, 128], tl.float32) + divisor
        first, second = tl.div_rn(first, by), tl.div_rn(second, by)
    low = (target * blocks + row)[:, None] * 256 + column[None, :]
    tl.store(values + low, first.to(values.dtype.element_ty), mask=inside)
    tl.store(values + low + 128, second.to(values.dtype.element_ty), mask=inside)


def pack(
    packed: torch.Tensor, values: torch.Tensor, pieces: int, bits: int, seed: int | None, residual: torch.Tensor | None
) -> None:
    """Queues ``Codec.pack`` on the current stream."""
    blocks = values.numel() // pieces // BLOCK
    if not blocks:
        return
    number = 0 if seed is None else seed - (seed >> 31 << 32)  # the same 32 bits, as a number that is always of 32 bits
    rest = values if residual is None else residual
    with torch.cuda.device(values.device):
        _pack[(triton.cdiv(blocks, _ROWS), pieces)](
            packed.view(torch.int8), packed.view(torch.float32), values, rest, blocks, number,
            BITS=bits, MOST=most_of(bits), LEAST=SMALLEST, NOISE=seed is not None, FEEDS=residual is not None, ROWS=_ROWS,
            num_warps=2, enable_fp_fusion=False,
        )  # fmt: skip


def unpack(values: torch.Tensor, packed: torch.Tensor, targets: int, pieces: int, bits: int, divisor: int) -> None:
    """Queues it: ``values`` become ``targets`` parts, each the sum of its own ``pieces``, in their order, over ``divisor``."""
    blocks = values.numel() // targets // BLOCK
    if not blocks:
        return
    with torch.cuda.device(values.device):
        _unpack[(triton.cdiv(blocks, _ROWS), targets)](
            values, packed.view(torch.int8), packed.view(torch.float32), blocks, pieces, float(divisor),
            BITS=bits, DIVIDES=divisor != 1, ROWS=_ROWS, num_warps=2, enable_fp_fusion=False,
        )  # fmt: skip
