"""Byte counts as people write and read them."""

import re
from fractions import Fraction

ALIGNMENT = 4096
"""Extents, and shards that may go to disk, start and end at multiples of this (O_DIRECT asks for it)."""

_UNITS = {
    "": 1,
    "B": 1,
    "K": 2**10,
    "M": 2**20,
    "G": 2**30,
    "T": 2**40,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
}
_PATTERN = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*")


def parse_bytes(value: int | str, what: str = "byte count") -> int:
    """``4096``, ``"20GiB"``, ``"20G"`` (the same) or ``"1.5 TB"`` as a number of bytes. ValueError for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise ValueError(f"{what} must be an int (bytes) or a string such as '20GiB', got {value!r}")
    if isinstance(value, int):
        number = value
    else:
        match = _PATTERN.fullmatch(value)
        if match is None or match[2].upper() not in _UNITS:
            raise ValueError(f"{what}: cannot read {value!r}; write an int (bytes) or a string such as '20GiB' or '500MB'")
        number = int(Fraction(match[1]) * _UNITS[match[2].upper()])
    if number < 0:
        raise ValueError(f"{what} must not be negative, got {value!r}")
    return number


def format_bytes(nbytes: int) -> str:
    """``21474836480`` as ``20.0 GiB``."""
    size = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{int(size)} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def readable_bytes(nbytes: int) -> int:
    """The next number of bytes below that one can write in short: three digits and a unit."""
    for unit in (2**40, 2**30, 2**20):
        if nbytes >= unit:
            step = Fraction(unit, 100 if nbytes < 10 * unit else 10 if nbytes < 100 * unit else 1)
            return int(nbytes // step * step)
    return nbytes


def written_bytes(nbytes: int) -> str:
    """As :func:`parse_bytes` reads it back, exactly: ``"14.5GiB"``, or the number where no short form is exact."""
    for unit, name in ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB")):
        for digits in (0, 1, 2):
            text = f"{nbytes / unit:.{digits}f}{name}"
            if nbytes >= unit and parse_bytes(text) == nbytes:
                return text
    return str(nbytes)


def align_up(nbytes: int, alignment: int = ALIGNMENT) -> int:
    """The next multiple of ``alignment`` at or above ``nbytes``."""
    return -(-nbytes // alignment) * alignment
