"""Files that hold weights: which tensors are in them, checked before anything is read, and ranges of those tensors.

``safetensors`` files are read here, without the library: a range of a tensor is a range of bytes at a known place. A file that
``torch.save`` wrote is mapped into memory by torch, which unpickles tensors only.
"""

import itertools
import json
import math
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from unwall.checkpoint.dtypes import DTYPES
from unwall.tiers.sizes import format_bytes

HEADER_LIMIT_BYTES = 100_000_000


class WeightsError(ValueError):
    """A file of weights that is not what it should be: says which file, which tensor, and what is wrong."""


@dataclass(frozen=True)
class Entry:
    """A tensor in a file."""

    name: str
    path: Path
    dtype: torch.dtype
    shape: torch.Size
    start: int
    """Its first byte, counted in the file."""
    tensor: torch.Tensor | None = None
    """The tensor itself, flat, where the file is mapped into memory."""

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class WeightFiles:
    """Tensors by name, over one file or several. Files are opened at the first read and closed with ``close``."""

    def __init__(self, entries: Iterable[Entry]) -> None:
        self.entries = {entry.name: entry for entry in entries}
        self._files: dict[Path, int] = {}

    def read(self, name: str, start: int, into: torch.Tensor) -> None:
        """Elements from ``start`` on into a flat, contiguous host tensor of the entry's dtype. May run in several threads."""
        entry = self.entries[name]
        if entry.tensor is not None:
            into.copy_(entry.tensor[start : start + into.numel()])
            return
        buffer = memoryview(into.view(torch.uint8).numpy().data)
        position = entry.start + start * entry.dtype.itemsize
        while buffer.nbytes:
            got = os.preadv(self._file(entry.path), [buffer], position)
            if got == 0:
                raise WeightsError(f"{entry.path} ends within the tensor {name!r}: it was made shorter while it was read")
            buffer, position = buffer[got:], position + got

    def _file(self, path: Path) -> int:
        if path not in self._files:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            if self._files.setdefault(path, descriptor) != descriptor:  # another thread was faster
                os.close(descriptor)
        return self._files[path]

    def close(self) -> None:
        while self._files:
            os.close(self._files.popitem()[1])


def open_file(path: Path) -> WeightFiles:
    """One file, of either kind."""
    return WeightFiles(read_entries(path))


def read_entries(path: Path) -> list[Entry]:
    """The tensors of one file, of either kind."""
    with path.open("rb") as file:
        head = file.read(4)
    if path.suffix == ".safetensors" or head[:2] not in (b"PK", b"\x80\x02"):
        return _safetensors_entries(path)
    return _torch_entries(path)


def _safetensors_entries(path: Path) -> list[Entry]:
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little") if size >= 8 else 0
        if not 2 <= length <= min(size - 8, HEADER_LIMIT_BYTES):
            raise WeightsError(
                f"{path} is no safetensors file, or was cut off: it has {size} bytes and says that its header takes {length}"
            )
        try:
            header = json.loads(file.read(length))
        except ValueError as error:
            raise WeightsError(f"the header of {path} is not JSON ({error}): it is no safetensors file, or damaged") from None
    if not isinstance(header, dict):
        raise WeightsError(f"the header of {path} is a {type(header).__name__}, not a table of tensors")
    found = [_entry(path, name, about, 8 + length, size) for name, about in header.items() if name != "__metadata__"]
    _check_apart(path, found)
    return found


def _entry(path: Path, name: str, about: Any, data_start: int, size: int) -> Entry:
    where = f"{path}: the tensor {name!r}"
    try:
        kind, shape, (low, high) = about["dtype"], about["shape"], about["data_offsets"]
        numbers = [*shape, low, high]
    except (TypeError, KeyError, ValueError):
        raise WeightsError(f"{where} has no dtype, shape and data_offsets in the header") from None
    if not all(isinstance(number, int) and not isinstance(number, bool) and number >= 0 for number in numbers):
        raise WeightsError(f"{where} has shape {shape} and offsets {[low, high]}: whole numbers of 0 and more are expected")
    if kind not in DTYPES:
        raise WeightsError(f"{where} has dtype {kind!r}; known are {', '.join(DTYPES)}")
    entry = Entry(name, path, DTYPES[kind], torch.Size(shape), data_start + low)
    if high - low != entry.nbytes:
        raise WeightsError(f"{where} of {kind} {list(shape)} takes {entry.nbytes} bytes, but the header gives it {high - low}")
    if data_start + high > size:
        raise WeightsError(
            f"{where} ends at byte {data_start + high}, but the file has {size} bytes: it was cut off, or its header is wrong"
        )
    return entry


def _check_apart(path: Path, entries: list[Entry]) -> None:
    placed = sorted((entry for entry in entries if entry.nbytes), key=lambda entry: entry.start)
    for one, other in itertools.pairwise(placed):
        if one.start + one.nbytes > other.start:
            raise WeightsError(f"{path}: the tensors {one.name!r} and {other.name!r} overlap: the header is wrong")


def _torch_entries(path: Path) -> list[Entry]:
    try:
        loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:
        first = str(error).strip().splitlines()[0]
        raise WeightsError(
            f"{path} cannot be read as weights alone ({type(error).__name__}: {first}): save model.state_dict() with torch.save"
        ) from None
    if not isinstance(loaded, dict) or not loaded:
        raise WeightsError(f"{path} holds a {type(loaded).__name__}: a model's state_dict(), names and tensors, is expected")
    for name, value in loaded.items():
        if not isinstance(name, str) or not isinstance(value, torch.Tensor):
            raise WeightsError(
                f"{path}: {name!r} is a {type(value).__name__}, not a tensor: save model.state_dict() alone with torch.save"
            )
    return [
        Entry(name, path, value.dtype, value.shape, 0, value.detach().contiguous().view(-1)) for name, value in loaded.items()
    ]


def describe(entry: Entry) -> str:
    """A tensor as messages show it."""
    return f"{entry.name} of {str(entry.dtype).removeprefix('torch.')} {list(entry.shape)} ({format_bytes(entry.nbytes)})"
