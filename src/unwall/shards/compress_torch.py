"""The blocks of shards/compress.py made by torch, on whatever device the numbers are: the same bits as the native kernels.

[Note: the same bits]
Each operation here is one rounding of IEEE arithmetic, in the order of native/cpp/quantise_impl.hpp. A division by a Python
number is not: on an accelerator torch multiplies by its inverse. So what is divided by is a tensor.
"""

import torch

BLOCK = 256
SMALLEST = 2.0**-100
_MIX = 0x045D9F3B
_MASK = 0xFFFFFFFF


def most_of(bits: int) -> int:
    """The largest code of a finite number."""
    return 126 if bits == 8 else 7


def pack_blocks(
    scales: torch.Tensor,
    codes: torch.Tensor,
    values: torch.Tensor,
    bits: int,
    first: int,
    seed: int | None,
    residual: torch.Tensor | None,
) -> None:
    """``values`` (a multiple of 256, flat) as ``scales`` (float, one per block) and ``codes`` (bytes). ``first``: the number of
    the first element."""
    exact = values.view(-1, BLOCK).float()
    if residual is not None:
        exact = exact + residual.view(-1, BLOCK).float()
    finite, most = exact.isfinite(), most_of(bits)
    clean = torch.where(finite, exact, 0.0)
    largest = clean.abs().amax(1, keepdim=True)
    counts, whole = largest >= SMALLEST, torch.full_like(largest, most)
    scale = torch.where(counts, largest / whole, 0.0)
    inverse = torch.where(counts, whole / largest, 0.0)
    chance = 0.5 if seed is None else _noise(first, values.numel(), seed, values.device).view(-1, BLOCK)
    found = (clean * inverse + chance).floor_().clamp_(-most, most)
    broken = ~finite.all(1, keepdim=True)
    if residual is not None:
        kept = finite if bits == 8 else finite & ~broken
        residual.view(-1, BLOCK).copy_(torch.where(kept, exact - found * scale, 0.0))
    if bits == 8:
        found = torch.where(exact.isinf(), torch.where(exact > 0, 127.0, -127.0), found)
        found = torch.where(exact.isnan(), -128.0, found)
        codes.view(torch.int8).view(-1, BLOCK).copy_(found)
    else:
        scale = torch.where(broken, float("nan"), scale)
        small = found.to(torch.int16) & 15
        codes.view(-1, BLOCK // 2).copy_(small[:, : BLOCK // 2] | (small[:, BLOCK // 2 :] << 4))
    scales.copy_(scale.view(-1))


def unpack_blocks(scales: torch.Tensor, codes: torch.Tensor, bits: int) -> torch.Tensor:
    """The inverse: floats, flat."""
    scale = scales.view(-1, 1)
    if bits == 4:
        small = codes.view(-1, BLOCK // 2).to(torch.int16)
        both = torch.cat([small & 15, small >> 4], 1)
        return (((both ^ 8) - 8).float() * scale).view(-1)
    found = codes.view(torch.int8).view(-1, BLOCK)
    values = found.float() * scale
    values = torch.where(found == 127, float("inf"), values)
    values = torch.where(found == -127, float("-inf"), values)
    return torch.where(found == -128, float("nan"), values).view(-1)


def _noise(first: int, count: int, seed: int, device: torch.device) -> torch.Tensor:
    """From 0 to 1, without the ends. Products of two numbers below 2^32 and 2^31: nothing overflows."""
    x = torch.arange(first, first + count, dtype=torch.int64, device=device) & _MASK
    x = ((x ^ (x >> 16)) * _MIX) & _MASK
    x = x ^ seed
    x = ((x ^ (x >> 16)) * _MIX) & _MASK
    x = ((x ^ (x >> 16)) * _MIX) & _MASK
    return (x >> 16).float() * 2.0**-16 + 2.0**-17
