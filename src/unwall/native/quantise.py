"""Blocks of small integers over raw host addresses: ``uw_quantise`` and ``uw_dequantise`` of unwall.h.

A piece is ``n`` elements, a multiple of 256: first a float scale for each block of 256, then the codes.
"""

import ctypes
from collections.abc import Sequence
from typing import Any

from unwall.native.pool import DType, WorkerPool
from unwall.native.ticket import NativeTicket

_Address, _Int, _Count = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64


def quantise(
    pool: WorkerPool,
    packed: int,
    src: int,
    dtype: DType,
    n: int,
    pieces: int,
    bits: int,
    *,
    seed: int | None = None,
    residual: int | None = None,
    keep: Sequence[Any] = (),
) -> NativeTicket:
    """Packs ``pieces`` pieces. ``seed``: of the noise of stochastic rounding, 32 bits; None rounds to nearest.

    ``residual``: as many elements of ``dtype``, added before. What the rounding has left of the sum is written there."""
    types = (_Address, _Address, _Address, _Int, _Count, _Int, _Int, _Int, ctypes.c_uint32)
    values = (packed, src, residual, dtype, n, pieces, bits, int(seed is not None), seed or 0)
    return pool._submit("uw_quantise", types, values, (), keep)


def dequantise(
    pool: WorkerPool,
    dst: int,
    packed: int,
    dtype: DType,
    n: int,
    pieces: int,
    bits: int,
    *,
    divisor: float = 0.0,
    keep: Sequence[Any] = (),
) -> NativeTicket:
    """Unpacks them side by side or, with a ``divisor``, their sum over it: added in float, in their order."""
    types = (_Address, _Address, _Int, _Count, _Int, _Int, ctypes.c_float)
    return pool._submit("uw_dequantise", types, (dst, packed, dtype, n, pieces, bits, divisor), (), keep)
