"""Host memory in exact sizes, outside the allocators of Python and torch."""

import ctypes
from typing import Any

from unwall.native import interrupts
from unwall.native.library import ErrorRecord, function
from unwall.native.pool import WorkerPool


class _Mapping:
    """One mapping, unmapped with its last reference: the owner and every buffer hold one."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.address = address
        self.nbytes = nbytes

    def __del__(self) -> None:
        try:
            with interrupts.finalizing:
                function("uw_memory_unmap", ctypes.c_int, ctypes.c_void_p, ctypes.c_int64)(self.address, self.nbytes)
        except (TypeError, AttributeError):  # the interpreter is shutting down and has taken ctypes apart
            pass


class HostMemory:
    """``nbytes`` of zeroed, page-aligned memory, on huge pages where the system has them.

    With a ``pool`` every page is brought in now, by all its workers; without, at the first write to it. The memory goes back
    to the system when this object and every view of ``buffer()`` are gone.
    """

    def __init__(self, nbytes: int, pool: WorkerPool | None = None) -> None:
        if nbytes <= 0:
            raise ValueError(f"HostMemory needs a size above 0, got {nbytes} bytes")
        record = ErrorRecord()
        call = function("uw_memory_map", ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p, ctypes.POINTER(ErrorRecord))
        address = call(nbytes, None if pool is None else pool.handle, ctypes.byref(record))
        if not address:
            raise record.exception()
        self._mapping = _Mapping(address, nbytes)

    @property
    def address(self) -> int:
        """Address of the first byte."""
        return self._mapping.address

    @property
    def nbytes(self) -> int:
        """The size that was asked for."""
        return self._mapping.nbytes

    def buffer(self) -> Any:
        """The bytes as a ctypes array, for ``torch.frombuffer`` and ``numpy.frombuffer``. It keeps the memory alive."""
        array = (ctypes.c_ubyte * self.nbytes).from_address(self.address)
        # Views made from the array refer to it, and so to the mapping, even when this object is gone.
        array._mapping = self._mapping  # type: ignore[attr-defined]
        return array
