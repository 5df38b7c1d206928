"""Finds and loads the native library, and turns its error record into exceptions.

The library is one shared object beside this file. It is looked for in every folder of the package (an editable install
has two), or taken from ``UNWALL_NATIVE_LIBRARY``. Importing never compiles.
"""

import ctypes
import errno
import functools
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ABI_VERSION = 6
FILE_NAME = "libunwall_native.so"

Handle = ctypes.c_uint64


class NativeError(RuntimeError):
    """The native library is missing, too old, or refused a call."""


class DiskError(OSError):
    """A disk request failed. ``errno``, ``filename``, ``offset`` and ``length`` say what and where."""

    def __init__(self, code: int, message: str, path: str, offset: int, length: int) -> None:
        super().__init__(code, f"{message} (offset {offset}, length {length})", path)
        self.reason = message
        self.offset = offset
        self.length = length


class ErrorRecord(ctypes.Structure):
    """``uw_error`` of unwall.h."""

    _fields_ = [
        ("code", ctypes.c_int32),
        ("op", ctypes.c_int32),
        ("offset", ctypes.c_int64),
        ("length", ctypes.c_int64),
        ("path", ctypes.c_char * 512),
        ("message", ctypes.c_char * 256),
    ]

    def exception(self) -> Exception:
        """The Python exception for this record: OSError where a file is involved, ValueError for a bad request."""
        message = bytes(self.message).decode(errors="replace")
        path = os.fsdecode(bytes(self.path))
        if path and self.code != errno.EINVAL:
            return DiskError(self.code, message or os.strerror(self.code), path, self.offset, self.length)
        if self.code == errno.EINVAL:
            return ValueError(f"{message} ({path})" if path else message)
        if self.code == errno.ENOMEM:
            return MemoryError(message)
        return NativeError(f"{message or 'native call failed'} [{errno.errorcode.get(self.code, self.code)}]")


def _candidates() -> list[Path]:
    chosen = os.environ.get("UNWALL_NATIVE_LIBRARY")
    if chosen:
        return [Path(chosen)]
    import unwall.native

    return [Path(folder) / FILE_NAME for folder in unwall.native.__path__]


def _load() -> ctypes.CDLL:
    candidates = _candidates()
    for path in candidates:
        if path.exists():
            library = ctypes.CDLL(str(path))
            found = library.uw_abi_version()
            if found != ABI_VERSION:
                raise NativeError(f"{path} has ABI {found}, this unwall needs {ABI_VERSION}: rebuild it with `make native`")
            return library
    looked = ", ".join(str(path) for path in candidates)
    raise NativeError(
        f"unwall's native library is not there (looked for {looked}). "
        "In a source tree build it with `make native` (needs cmake and a C++17 compiler); otherwise install with pip."
    )


_library: ctypes.CDLL | None = None


@functools.cache
def function(name: str, result: Any, *arguments: Any) -> Any:
    """The library's function with its types set. Loads the library at the first call.

    Calls release the GIL (``ctypes.CDLL`` does), so a blocking call never stops other Python threads.
    """
    global _library
    if _library is None:
        _library = _load()
    found = _library[name]
    found.restype = result
    found.argtypes = list(arguments)
    return found


def tickets_array(handles: Sequence[int]) -> tuple[Any, int]:
    """The ``after`` arguments of a submit call."""
    return ((Handle * len(handles))(*handles) if handles else None), len(handles)
