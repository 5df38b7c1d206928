"""CRC-32, the one of zlib, over raw host addresses: by the calling thread, alone or on the way of a copy.

Each function takes the checksum of what came before (0: nothing) and gives that of both together. Other Python threads run
meanwhile. The caller keeps the memory alive.
"""

import ctypes

from unwall.native.library import function

_Address, _Count, _Value = ctypes.c_void_p, ctypes.c_int64, ctypes.c_uint32


def crc32(source: int, nbytes: int, value: int = 0) -> int:
    """Of bytes in memory."""
    return int(function("uw_crc32", _Value, _Address, _Count, _Value)(source, nbytes, value))


def crc32_copy(target: int, source: int, nbytes: int, value: int = 0) -> int:
    """Of bytes, which are copied to ``target``."""
    return int(function("uw_crc32_copy", _Value, _Address, _Address, _Count, _Value)(target, source, nbytes, value))


def crc32_join(target: int, half: int, remainder: int, n: int, value: int = 0) -> int:
    """Of ``n`` floats, which are put together at ``target``. See ``WorkerPool.join``."""
    call = function("uw_crc32_join", _Value, _Address, _Address, _Address, _Count, _Value)
    return int(call(target, half, remainder, n, value))


def crc32_split(half: int, remainder: int, source: int, n: int, value: int = 0) -> int:
    """Of ``n`` floats at ``source``, which are taken apart. See ``WorkerPool.split``."""
    call = function("uw_crc32_split", _Value, _Address, _Address, _Address, _Count, _Value)
    return int(call(half, remainder, source, n, value))
