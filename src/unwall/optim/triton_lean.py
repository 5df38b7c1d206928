# ruff: noqa: ANN001, ANN202, N803 (a kernel's arguments are Triton's)
"""The update of lean states on an accelerator, one pass over memory. Imported only where there is one.

What the bytes mean is said in [Note: lean format] of native/cpp/lean_impl.hpp. The operations and their order are those of
``lean_update`` in optim/lean_format.py, and so are the bits.

[Note: the same bits from Triton]
Each operation on floats is one rounding of IEEE arithmetic: a product and a sum are never made one operation
(``enable_fp_fusion=False``), division and square root are those that round correctly (``div_rn``, ``sqrt_rn``; compiled for
NVIDIA they keep what is below 2^-126, too), and constants are rounded to fp32 before they are handed over. The rest is
arithmetic on whole numbers. Random bits are unsigned, so that they are shifted without a sign.
"""

import torch
import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]

from unwall.native.lean import BLOCK
from unwall.native.pool import AdamWStep
from unwall.optim.lean_format import LeanNumbers

_ROWS = 16
"""Blocks per program: 8 elements for each of 128 threads."""

_SHIFT = tl.constexpr(19)
_SCALE_BIAS = tl.constexpr(40)
_ONE = tl.constexpr(1 << 23)
_ROOT_REBIAS = tl.constexpr(112 << 23)
_LEAST_ROOT = tl.constexpr(2.0**-14)  # the smallest normal one, whose bits are _ROOT_REBIAS + _ONE
_RATIO_REBIAS = tl.constexpr(123 << 23)
_LEAST_RATIO = tl.constexpr(2.0**-3)
_MOST_ROOT = tl.constexpr(2.0**58)
_MOST_RATIO = tl.constexpr(15.5)
_LEAST_PRODUCT = tl.constexpr(2.0**-126)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _bits(values):  # type: ignore[no-untyped-def]
    return values.to(tl.int32, bitcast=True)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _float(bits):  # type: ignore[no-untyped-def]
    return bits.to(tl.float32, bitcast=True)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _wide(values):  # type: ignore[no-untyped-def]
    """Gradients in fp32. bf16 by its bits: not every Triton keeps the smallest numbers when it converts them."""
    if values.dtype == tl.bfloat16:
        wide = _float(values.to(tl.int16, bitcast=True).to(tl.int32) << 16)
    else:
        wide = values.to(tl.float32)
    return wide


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _widen(codes, REBIAS: tl.constexpr, LEAST: tl.constexpr):  # type: ignore[no-untyped-def]
    """The values of small floats without a sign."""
    wide = codes << _SHIFT
    return tl.where(wide < _ONE, _float(wide + (REBIAS + _ONE)) - LEAST, _float(wide + REBIAS))


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _narrow(values, REBIAS: tl.constexpr, LEAST: tl.constexpr):  # type: ignore[no-untyped-def]
    """The other way, before the lowest bits are cut off."""
    return tl.where(values < LEAST, _bits(values + LEAST) - _ONE, _bits(values)) - REBIAS


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _noise(param, raw, key):  # type: ignore[no-untyped-def]
    """The random bits of elements: of the bits of parameter and gradient."""
    x = param.to(tl.uint32, bitcast=True) * 0x9E3779B1
    x = x + (raw.to(tl.uint32, bitcast=True) ^ key.to(tl.uint32, bitcast=True))
    x = (x ^ (x >> 16)) * 0x85EBCA6B
    x = (x ^ (x >> 13)) * 0xC2B2AE35
    return x ^ (x >> 16)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _unpack(codes, lane, carries):  # type: ignore[no-untyped-def]
    """Roots and ratios of blocks."""
    scale = tl.sum(tl.where(carries, (codes & 1) << lane, 0), 1) - _SCALE_BIAS
    root = _widen((codes >> 8) & 0xFF, _ROOT_REBIAS, _LEAST_ROOT) * _float((scale + 127) << 23)[:, None]
    size = _widen(codes & tl.where(carries, 0x7E, 0x7F), _RATIO_REBIAS, _LEAST_RATIO)
    return root, _float(_bits(size) | ((codes & 0x80) << 24))


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _pack(root, ratio, noise, lane, carries):  # type: ignore[no-untyped-def]
    """Blocks as they are stored, rounded at random."""
    low, high = (noise & 0x7FFFF).to(tl.int32), (noise >> 13).to(tl.int32)
    root = tl.where(root < _MOST_ROOT, root, 0.0)
    scale = tl.maximum((tl.max(_bits(root) + low, 1) >> 23) - 127, -_SCALE_BIAS)
    up = _float((127 - scale) << 23)[:, None]
    roots = (_narrow(root * up, _ROOT_REBIAS, _LEAST_ROOT) + low) >> _SHIFT
    size = _float(_bits(ratio) & 0x7FFFFFFF)
    size = tl.where(size < _MOST_RATIO, size, _MOST_RATIO)
    ratios = (_narrow(size, _RATIO_REBIAS, _LEAST_RATIO) + tl.where(carries, high * 2, high)) >> _SHIFT
    ratios = tl.where(roots == 0, 0, tl.minimum(ratios, 127) & tl.where(carries, 0x7E, 0x7F))
    sign = tl.where(ratios == 0, 0, (_bits(ratio) >> 24) & 0x80)
    carried = tl.where(carries, ((scale + _SCALE_BIAS)[:, None] >> lane) & 1, 0)
    return (roots << 8) | sign | ratios | carried


@triton.jit(do_not_specialize=["key", "blocks"])  # type: ignore[untyped-decorator,unused-ignore]
def _lean_adamw(  # type: ignore[no-untyped-def]
    half, remainder, moments, grad, factor, blocks, count, key,
    grad_scale, beta1, weight1, beta2, weight2, unbias, eps, keep, rate,
    SCALED: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, 64)
    at = row[:, None] * 64 + column[None, :]
    there = (row < blocks)[:, None] & (column < 64)[None, :]
    inside = (row < blocks)[:, None] & (column < count)[None, :]
    lane, carries = (column & 7)[None, :], (column < 8)[None, :]

    upper = tl.load(half + at, mask=inside, other=0).to(tl.int32)
    lower = tl.load(remainder + at, mask=inside, other=0).to(tl.int32)
    raw = _wide(tl.load(grad + at, mask=inside, other=0.0))
    whole = (upper << 16) + (lower << 8)
    noise = _noise(whole, _bits(raw), key)
    root, ratio = _unpack(tl.load(moments + at, mask=there, other=0).to(tl.int32), lane, carries)

    g = raw * grad_scale
    if SCALED:
        g = g * tl.load(factor).to(tl.float32)
    m = beta1 * (ratio * root) + weight1 * g
    v = beta2 * (root * root) + weight2 * g * g
    root = tl.sqrt_rn(v)
    bounded = tl.where(root < _MOST_ROOT, root, _MOST_ROOT)
    below = bounded * unbias + eps
    product = bounded * below
    shared = tl.div_rn(m, tl.where(product > _LEAST_PRODUCT, product, _LEAST_PRODUCT))
    p = _float(whole) * keep - rate * (bounded * shared)
    codes = _pack(root, below * shared, noise, lane, carries)
    tl.store(moments + at, codes.to(tl.int16), mask=there)

    bits = _bits(p)
    bits = tl.where((bits & 0x7FFFFFFF) > 0x7F800000, ((bits >> 31) << 31) | 0x7FC00000, bits)
    bits = ((bits + ((noise >> 12) & 0xFF).to(tl.int32)) >> 8) << 8
    tl.store(half + at, ((bits + 0x8000) >> 16).to(tl.int16), mask=inside)
    tl.store(remainder + at, (bits >> 8).to(tl.int8), mask=inside)


def launch(
    half: torch.Tensor,
    remainder: torch.Tensor,
    moments: torch.Tensor,
    grad: torch.Tensor,
    step: AdamWStep,
    factor: torch.Tensor | None = None,
) -> None:
    """Queues ``lean_update`` on the current stream. ``moments`` holds whole blocks."""
    numbers, numel = LeanNumbers.of(step), half.numel()
    cut = numel - numel % BLOCK
    for part, count in ((slice(0, cut), BLOCK), (slice(cut, numel), numel - cut)):
        # The last block, where it is cut, by itself: with a count that is a multiple of 16 (Triton compiles those apart) a
        # thread's elements are inside or outside together, and are loaded at once.
        if count and half[part].numel():
            _launch(half[part], remainder[part], moments[part.start :], grad[part], count, numbers, factor)


def _launch(
    half: torch.Tensor,
    remainder: torch.Tensor,
    moments: torch.Tensor,
    grad: torch.Tensor,
    count: int,
    numbers: LeanNumbers,
    factor: torch.Tensor | None,
) -> None:
    """Blocks that have ``count`` elements each."""
    blocks = triton.cdiv(half.numel(), BLOCK)
    with torch.cuda.device(half.device):
        _lean_adamw[(triton.cdiv(blocks, _ROWS),)](
            half.view(torch.int16), remainder, moments, grad, grad if factor is None else factor, blocks, count,
            numbers.key - (numbers.key >> 31 << 32),  # the same 32 bits, as a number that is always of 32 bits
            numbers.grad_scale, numbers.beta1, numbers.weight1, numbers.beta2, numbers.weight2,
            numbers.unbias, numbers.eps, numbers.keep, numbers.rate,
            SCALED=factor is not None, ROWS=_ROWS, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
