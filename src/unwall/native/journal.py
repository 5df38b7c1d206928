"""AdamW updates in place that can be taken back, bit by bit: the native kernels of cpp/journal_impl.hpp over raw addresses."""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from unwall.native.library import function
from unwall.native.pool import AdamWStep, DType, WorkerPool, _AdamWArguments
from unwall.native.ticket import NativeTicket

_Address = ctypes.c_void_p
_Arguments = ctypes.POINTER(_AdamWArguments)


@dataclass(frozen=True, kw_only=True)
class AdamWArrays:
    """The addresses of an update in place; as the arguments of ``WorkerPool.adamw``."""

    param: int
    exp_avg: int
    exp_avg_sq: int
    grad: int
    n: int
    grad_dtype: DType = DType.F32
    remainder: int | None = None
    copy: int | None = None
    copy_dtype: DType = DType.BF16

    def with_numbers(self, step: AdamWStep) -> _AdamWArguments:
        return _AdamWArguments(
            self.param, self.remainder, self.copy, self.exp_avg, self.exp_avg_sq, self.grad, None, None, None, None, self.n,
            int(self.remainder is not None), self.grad_dtype, self.copy_dtype,
            step.lr, step.beta1, step.beta2, step.eps, step.weight_decay, step.grad_scale, step.step,
        )  # fmt: skip


class JournalCount(NamedTuple):
    """What a journal knows of its update."""

    escaped: int
    """Elements whose way back did not fit into two bytes: their old values are kept as they are."""
    owing: int
    """Elements that were not updated, because too many around them escaped. ``resolve`` updates them."""


def journal_bytes(n: int) -> int:
    """Memory for the journal of an update of ``n`` elements: a little more than two bytes for each."""
    found: int = function("uw_journal_bytes", ctypes.c_int64, ctypes.c_int64)(n)
    return found


def read_journal(journal: int, n: int) -> JournalCount:
    """After the update has ended, and before it is resolved."""
    escaped, owing = ctypes.c_int64(), ctypes.c_int64()
    types = (_Address, ctypes.c_int64, ctypes.POINTER(ctypes.c_int64), ctypes.POINTER(ctypes.c_int64))
    if function("uw_journal_read", ctypes.c_int, *types)(journal, n, ctypes.byref(escaped), ctypes.byref(owing)) < 0:
        raise ValueError(f"there is no journal of {n} elements at address {journal}")
    return JournalCount(escaped.value, owing.value)


def update_journaled(
    pool: WorkerPool,
    arrays: AdamWArrays,
    step: AdamWStep,
    journal: int,
    *,
    after: Sequence[NativeTicket] = (),
    keep: Sequence[Any] = (),
) -> NativeTicket:
    """Updates in place, with the bits of ``WorkerPool.adamw``, and writes down the way back.

    ``journal``: ``journal_bytes(n)`` bytes that start a line of 64, zeroed before their first use."""
    values = (ctypes.byref(arrays.with_numbers(step)), journal)
    return pool._submit("uw_adamw_journaled", (_Arguments, _Address), values, after, keep)


def resolve(
    pool: WorkerPool,
    arrays: AdamWArrays,
    used: AdamWStep,
    again: AdamWStep | None,
    journal: int,
    *,
    after: Sequence[NativeTicket] = (),
    keep: Sequence[Any] = (),
) -> NativeTicket:
    """Ends what ``update_journaled`` with the numbers ``used`` has begun. The gradients must be those it has read.

    Without ``again`` every element gets its old bits back. With it, in one pass, those of an update with these numbers; where
    they are the same, nothing is left to do. Whatever has ended already is left alone, so it can be called again."""
    other = None if again is None else ctypes.byref(arrays.with_numbers(again))
    values = (ctypes.byref(arrays.with_numbers(used)), other, journal)
    return pool._submit("uw_adamw_resolve", (_Arguments, _Arguments, _Address), values, after, keep)
