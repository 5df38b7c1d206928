"""The native update of lean states, over raw host addresses. See [Note: lean format] in native/cpp/lean_impl.hpp."""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from unwall.native.pool import AdamWStep, DType, WorkerPool
from unwall.native.ticket import NativeTicket

BLOCK = 64
"""Elements that share a scale: arrays begin with a block, and those of the moments hold whole blocks."""

_Address = ctypes.c_void_p


@dataclass(frozen=True)
class LeanArrays:
    """Addresses of the states of a run of elements."""

    half: int
    remainder: int
    moments: int


class _Arguments(ctypes.Structure):
    """``uw_lean_args`` of unwall.h."""

    _fields_ = [
        ("half", _Address),
        ("remainder", _Address),
        ("moments", _Address),
        ("grad", _Address),
        ("out_half", _Address),
        ("out_remainder", _Address),
        ("out_moments", _Address),
        ("n", ctypes.c_int64),
        ("grad_dtype", ctypes.c_int32),
        ("lr", ctypes.c_double),
        ("beta1", ctypes.c_double),
        ("beta2", ctypes.c_double),
        ("eps", ctypes.c_double),
        ("weight_decay", ctypes.c_double),
        ("grad_scale", ctypes.c_double),
        ("step", ctypes.c_int64),
    ]


def lean_adamw(
    pool: WorkerPool,
    states: LeanArrays,
    grad: int,
    n: int,
    step: AdamWStep,
    *,
    grad_dtype: DType = DType.BF16,
    out: LeanArrays | None = None,
    after: Sequence[NativeTicket] = (),
    keep: Sequence[Any] = (),
) -> NativeTicket:
    """Updates ``n`` elements in place or into ``out``, which then overlaps nothing, with the same bits."""
    new = states if out is None else out
    arguments = _Arguments(
        states.half, states.remainder, states.moments, grad, new.half, new.remainder, new.moments, n, grad_dtype,
        step.lr, step.beta1, step.beta2, step.eps, step.weight_decay, step.grad_scale, step.step,
    )  # fmt: skip
    types = (ctypes.POINTER(_Arguments),)
    return pool._submit("uw_lean_adamw", types, (ctypes.byref(arguments),), after, keep)


def read_lean(pool: WorkerPool, target: int, moments: int, squares: bool, n: int, *, keep: Sequence[Any] = ()) -> NativeTicket:
    """``exp_avg`` or, with ``squares``, ``exp_avg_sq`` of ``n`` elements as floats."""
    types = (_Address, _Address, ctypes.c_int32, ctypes.c_int64)
    return pool._submit("uw_lean_read", types, (target, moments, squares, n), (), keep)


def write_lean(pool: WorkerPool, moments: int, source: int, squares: bool, n: int, *, keep: Sequence[Any] = ()) -> NativeTicket:
    """Sets one of the two, rounded to nearest. ``exp_avg_sq`` is to be set first."""
    types = (_Address, _Address, ctypes.c_int32, ctypes.c_int64)
    return pool._submit("uw_lean_write", types, (moments, source, squares, n), (), keep)
