"""The worker pool of the native library: kernels over raw host addresses, run by native threads.

Addresses and counts instead of tensors: this layer knows no torch. What an address points into goes into ``keep``, and the
ticket holds it until the work has ended.
"""

import ctypes
import enum
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from unwall.native import interrupts
from unwall.native.at_exit import ends_at_exit
from unwall.native.library import ErrorRecord, Handle, function, tickets_array
from unwall.native.ticket import NativeTicket

_Record = ctypes.POINTER(ErrorRecord)
_Address = ctypes.c_void_p
_After = (ctypes.POINTER(Handle), ctypes.c_int32, _Record)


class DType(enum.IntEnum):
    """``uw_dtype``: the element types that the kernels know."""

    F32 = 0
    BF16 = 1
    F16 = 2


@dataclass(frozen=True, kw_only=True)
class AdamWStep:
    """The numbers of one AdamW update."""

    lr: float
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0
    grad_scale: float = 1.0
    """Multiplies each gradient element first: clipping, or one over the loss scale."""
    step: int
    """1 at the first update."""

    def scaled(self, scale: float) -> "AdamWStep":
        """The same with gradients multiplied by ``scale``, too."""
        return self if scale == 1.0 else replace(self, grad_scale=self.grad_scale * scale)

    def at(self, step: int) -> "AdamWStep":
        """The same of another step."""
        return replace(self, step=step)


@dataclass(frozen=True)
class AdamWOut:
    """Addresses that an AdamW update out of place writes to. Each is as long as the array it is to replace."""

    param: int
    exp_avg: int
    exp_avg_sq: int
    remainder: int | None = None
    """Split master only, and then needed."""


class SumSquares:
    """Where a ``sum_squares`` job leaves its result. NaN and -1 until its ticket has finished well."""

    def __init__(self) -> None:
        self._sum = ctypes.c_double(float("nan"))
        self._nonfinite = ctypes.c_int64(-1)

    @property
    def sum(self) -> float:
        """The sum of squares of all elements."""
        return self._sum.value

    @property
    def nonfinite(self) -> int:
        """How many elements are inf or NaN."""
        return self._nonfinite.value


class _AdamWArguments(ctypes.Structure):
    """``uw_adamw_args`` of unwall.h."""

    _fields_ = [
        ("param", _Address),
        ("remainder", _Address),
        ("copy", _Address),
        ("exp_avg", _Address),
        ("exp_avg_sq", _Address),
        ("grad", _Address),
        ("out_param", _Address),
        ("out_remainder", _Address),
        ("out_exp_avg", _Address),
        ("out_exp_avg_sq", _Address),
        ("n", ctypes.c_int64),
        ("master", ctypes.c_int32),
        ("grad_dtype", ctypes.c_int32),
        ("copy_dtype", ctypes.c_int32),
        ("lr", ctypes.c_double),
        ("beta1", ctypes.c_double),
        ("beta2", ctypes.c_double),
        ("eps", ctypes.c_double),
        ("weight_decay", ctypes.c_double),
        ("grad_scale", ctypes.c_double),
        ("step", ctypes.c_int64),
    ]


def isa() -> str:
    """The instruction set that the kernels run with: "avx512", "avx2" or "baseline"."""
    name: bytes = function("uw_isa", ctypes.c_char_p)()
    return name.decode()


def select_isa(name: str) -> None:
    """Runs jobs submitted from now on with another instruction set. ValueError where this processor does not have it."""
    if function("uw_isa_select", ctypes.c_int, ctypes.c_char_p)(name.encode()) < 0:
        raise ValueError(f"this processor does not run the kernels for {name!r} (it runs {isa()!r} now)")


class WorkerPool:
    """Native threads that run jobs first in, first out, each job on all of them.

    ``threads`` is one for each core we may use (or each of ``cores``) unless given; ``cores`` binds the threads, round robin.
    Every method that starts work returns at once with its ticket. Where a ticket in ``after`` fails, the work does not run
    and fails with the same error.
    """

    def __init__(self, threads: int | None = None, cores: Sequence[int] | None = None) -> None:
        self._handle: int | None = None
        self._pid = os.getpid()
        if threads is None:
            threads = len(cores) if cores else len(os.sched_getaffinity(0))
        list_of_cores = (ctypes.c_int32 * len(cores))(*cores) if cores else None
        call = function("uw_pool_create", _Address, ctypes.c_int32, ctypes.POINTER(ctypes.c_int32), ctypes.c_int32, _Record)
        record = ErrorRecord()
        self._handle = call(threads, list_of_cores, len(cores) if cores else 0, ctypes.byref(record))
        if not self._handle:
            raise record.exception()
        self.threads = threads
        ends_at_exit(self, disk=False)

    @property
    def handle(self) -> int:
        """The native id. RuntimeError when the pool is closed or belongs to the parent process."""
        if self._handle is None:
            raise RuntimeError("this WorkerPool is closed")
        if os.getpid() != self._pid:
            raise RuntimeError(
                f"this WorkerPool belongs to process {self._pid} and its threads are there; make a new one after a fork"
            )
        return self._handle

    def adamw(
        self,
        param: int,
        exp_avg: int,
        exp_avg_sq: int,
        grad: int,
        n: int,
        step: AdamWStep,
        *,
        grad_dtype: DType = DType.F32,
        remainder: int | None = None,
        copy: int | None = None,
        copy_dtype: DType = DType.BF16,
        out: AdamWOut | None = None,
        after: Sequence[NativeTicket] = (),
        keep: Sequence[Any] = (),
    ) -> NativeTicket:
        """Updates ``n`` parameters and their two moments in place, or into ``out``, with the same bits.

        With ``remainder`` the master is split: ``param`` is its bf16 half and ``remainder`` the int16 rest. Without, ``param``
        is float32 and, where ``copy`` is given, also written there in ``copy_dtype``.

        With ``out`` nothing but ``copy`` and the arrays of ``out`` is written. None of those may overlap another array of the
        update, except that one of ``out`` may be the very array that it replaces.
        """
        if out is not None and n > 0 and not out.param:
            raise ValueError("`out.param` is null: an update out of place needs every output")
        new = out or AdamWOut(0, 0, 0)
        arguments = _AdamWArguments(
            param, remainder, copy, exp_avg, exp_avg_sq, grad,
            new.param, new.remainder, new.exp_avg, new.exp_avg_sq, n, int(remainder is not None), grad_dtype, copy_dtype,
            step.lr, step.beta1, step.beta2, step.eps, step.weight_decay, step.grad_scale, step.step,
        )  # fmt: skip
        types = (ctypes.POINTER(_AdamWArguments),)
        return self._submit("uw_adamw", types, (ctypes.byref(arguments),), after, keep)

    def sum_squares(
        self, src: int, n: int, dtype: DType = DType.F32, *, after: Sequence[NativeTicket] = (), keep: Sequence[Any] = ()
    ) -> tuple[NativeTicket, SumSquares]:
        """Sums squares in double and counts what is not finite. The bits of the result depend on the elements alone."""
        result = SumSquares()
        types = (
            _Address, ctypes.c_int32, ctypes.c_int64, ctypes.POINTER(ctypes.c_double), ctypes.POINTER(ctypes.c_int64),
        )  # fmt: skip
        values = (src, dtype, n, ctypes.byref(result._sum), ctypes.byref(result._nonfinite))
        return self._submit("uw_sum_squares", types, values, after, (*keep, result)), result

    def accumulate(
        self,
        dst: int,
        src: int,
        n: int,
        dtype: DType = DType.F32,
        *,
        after: Sequence[NativeTicket] = (),
        keep: Sequence[Any] = (),
    ) -> NativeTicket:
        """Adds ``n`` elements of ``dtype`` to the floats at ``dst``."""
        types = (_Address, _Address, ctypes.c_int32, ctypes.c_int64)
        return self._submit("uw_accumulate", types, (dst, src, dtype, n), after, keep)

    def cast(
        self,
        dst: int,
        dst_dtype: DType,
        src: int,
        src_dtype: DType,
        n: int,
        *,
        after: Sequence[NativeTicket] = (),
        keep: Sequence[Any] = (),
    ) -> NativeTicket:
        """Converts ``n`` elements, rounding to nearest even."""
        types = (_Address, ctypes.c_int32, _Address, ctypes.c_int32, ctypes.c_int64)
        return self._submit("uw_cast", types, (dst, dst_dtype, src, src_dtype, n), after, keep)

    def split(
        self, half: int, remainder: int, src: int, n: int, *, after: Sequence[NativeTicket] = (), keep: Sequence[Any] = ()
    ) -> NativeTicket:
        """Splits floats into a bf16 half and an int16 remainder, without loss for every finite value."""
        types = (_Address, _Address, _Address, ctypes.c_int64)
        return self._submit("uw_split", types, (half, remainder, src, n), after, keep)

    def join(
        self, dst: int, half: int, remainder: int, n: int, *, after: Sequence[NativeTicket] = (), keep: Sequence[Any] = ()
    ) -> NativeTicket:
        """The inverse of ``split``."""
        types = (_Address, _Address, _Address, ctypes.c_int64)
        return self._submit("uw_join", types, (dst, half, remainder, n), after, keep)

    def copy(
        self, dst: int, src: int, nbytes: int, *, after: Sequence[NativeTicket] = (), keep: Sequence[Any] = ()
    ) -> NativeTicket:
        """Copies bytes between ranges that do not overlap."""
        return self._submit("uw_copy", (_Address, _Address, ctypes.c_int64), (dst, src, nbytes), after, keep)

    def throttle(self, bytes_per_second: float) -> None:
        """Slows the pool down to this many bytes of traffic per second (0: full speed). For tests of overlap."""
        if function("uw_pool_throttle", ctypes.c_int, _Address, ctypes.c_double)(self.handle, bytes_per_second) < 0:
            raise ValueError(f"bytes_per_second is {bytes_per_second}, expected 0 or more")

    def close(self) -> None:
        """Finishes what was submitted, then stops the threads. A second call does nothing."""
        handle, self._handle = self._handle, None
        # A forked child has no threads to stop: it just forgets the pool.
        if handle is not None and os.getpid() == self._pid:
            function("uw_pool_close", ctypes.c_int, _Address)(handle)

    def end(self) -> None:
        """Finishes what was submitted and can run, and stays open. See native/at_exit.py."""
        if self._handle is not None:
            byte = ctypes.create_string_buffer(2)
            address = ctypes.addressof(byte)
            self.copy(address, address + 1, 1, keep=(byte,)).wait()  # first in, first out

    def __enter__(self) -> "WorkerPool":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __del__(self) -> None:
        try:
            with interrupts.finalizing:
                self.close()
        except (TypeError, AttributeError):  # the interpreter is shutting down and has taken ctypes apart
            pass

    def _submit(
        self,
        name: str,
        types: tuple[Any, ...],
        values: tuple[Any, ...],
        after: Sequence[NativeTicket],
        keep: Sequence[Any],
    ) -> NativeTicket:
        record = ErrorRecord()
        tickets, count = tickets_array([ticket.handle for ticket in after])
        call = function(name, Handle, _Address, *types, *_After)
        handle = call(self.handle, *values, tickets, count, ctypes.byref(record))
        if not handle:
            raise record.exception()
        # The pool as well: dropped while a job waits for a signal, it would wait for that job in its finaliser.
        return NativeTicket(handle, (*keep, *after, self))
