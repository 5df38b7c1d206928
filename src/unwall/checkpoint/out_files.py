"""``safetensors`` files that several ranks write at once, each its own ranges.

Where every tensor lies follows from names, shapes and dtypes, so every rank knows it. Rank 0 makes the files, with room for
everything, under other names; when all ranks have written they get the names that readers look for. So a directory never
holds half of a model that looks like a whole one.
"""

import json
import mmap
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from unwall.checkpoint.directory import sync_directory
from unwall.checkpoint.dtypes import name_of
from unwall.checkpoint.manifest import MANIFEST, file_name
from unwall.checkpoint.match import Match
from unwall.tiers.sizes import format_bytes

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_NUMBERED = re.compile(r"model-\d{5}-of-\d{5}\.safetensors")


@dataclass(frozen=True)
class Spec:
    """A tensor that will be written."""

    dtype: torch.dtype
    shape: torch.Size

    @property
    def nbytes(self) -> int:
        return self.shape.numel() * self.dtype.itemsize


@dataclass(frozen=True)
class OutFile:
    """One file: its header, and where each tensor begins."""

    name: str
    header: bytes
    starts: dict[str, int]
    nbytes: int


def plan_files(specs: Mapping[str, Spec], max_shard_bytes: int) -> list[OutFile]:
    """Files of at most ``max_shard_bytes``, filled in the order given; a tensor that is larger has a file of its own."""
    bins: list[list[str]] = []
    filling: list[str] = []
    filled = 0
    for name, spec in specs.items():
        if spec.nbytes > max_shard_bytes:
            bins.append([name])
            continue
        if filled + spec.nbytes > max_shard_bytes and filling:
            bins.append(filling)
            filling, filled = [], 0
        filling.append(name)
        filled += spec.nbytes
    if filling or not bins:
        bins.append(filling)
    total = len(bins)
    names = [SINGLE] if total == 1 else [f"model-{number:05d}-of-{total:05d}.safetensors" for number in range(1, total + 1)]
    return [_plan_file(name, {key: specs[key] for key in keys}) for name, keys in zip(names, bins, strict=True)]


def _plan_file(name: str, specs: dict[str, Spec]) -> OutFile:
    table: dict[str, object] = {"__metadata__": {"format": "pt"}}
    starts, offset = {}, 0
    for key in sorted(specs, key=lambda key: (-specs[key].dtype.itemsize, key)):  # every tensor is aligned to its dtype
        spec = specs[key]
        starts[key] = offset
        offsets = [offset, offset + spec.nbytes]
        table[key] = {"dtype": name_of(spec.dtype, key), "shape": list(spec.shape), "data_offsets": offsets}
        offset += spec.nbytes
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    header = len(text).to_bytes(8, "little") + text
    return OutFile(name, header, {key: len(header) + start for key, start in starts.items()}, len(header) + offset)


class OutFiles:
    """The files while they are written. ``shared_by_machines``: ranks of several machines write them."""

    def __init__(self, folder: Path, specs: Mapping[str, Spec], files: list[OutFile], *, shared_by_machines: bool) -> None:
        self.folder = folder
        self.files = files
        self._specs = specs
        self._places = {key: file for file in files for key in file.starts}
        self._open: dict[str, int] = {}
        # A client of a network file system may write back whole pages, with what neighbours wrote as it was before.
        self._by_rows = shared_by_machines
        self._flags = os.O_RDWR | os.O_CLOEXEC | (os.O_DSYNC if shared_by_machines else 0)

    def create(self) -> None:
        """What rank 0 does first. OSError, with the bytes that are missing, where the disk has no room."""
        if all((self.folder / name).exists() for name in (MANIFEST, file_name(0))):  # others, too, write a manifest
            raise ValueError(f"{self.folder} is a checkpoint of unwall.save: write the weights to a directory of their own")
        self.folder.mkdir(parents=True, exist_ok=True)
        for file in self.files:
            path = self._partial(file)
            path.unlink(missing_ok=True)
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
            try:
                os.posix_fallocate(descriptor, 0, file.nbytes)
                os.pwrite(descriptor, file.header, 0)
            except OSError as error:
                error.filename = str(path)
                error.add_note(f"writing weights to {self.folder} needs {format_bytes(sum(f.nbytes for f in self.files))}")
                raise
            finally:
                os.close(descriptor)

    def check_shared(self) -> None:
        """Every rank must see the files that rank 0 made."""
        missing = [file.name for file in self.files if not self._partial(file).is_file()]
        if missing:
            raise FileNotFoundError(
                f"{self.folder} is not the directory that rank 0 writes to: all ranks need a file system that they share"
            )

    def write(self, part: Match, values: torch.Tensor, near_start: int) -> int:
        """Elements of the far side, from ``values``, which hold the near side from ``near_start`` on (flat, on the host).
        Gives their bytes."""
        file, spec = self._places[part.far], self._specs[part.far]
        if self._by_rows and not part.is_run and part.near_strides[-1] == part.far_strides[-1] == 1:
            rows = (part.narrow(0, number, 1).simplified() for number in range(part.extents[0]))
            return sum(self.write(row, values, near_start) for row in rows)
        first = values.storage_offset() + part.near_start - near_start
        source = values.as_strided(part.extents, part.near_strides, first).to(spec.dtype)
        begin = file.starts[part.far]
        if part.is_run:
            data = memoryview(source.reshape(-1).contiguous().view(torch.uint8).numpy().data)
            position = begin + part.far_start * spec.dtype.itemsize
            while data.nbytes:
                done = os.pwrite(self._file(file), data, position)
                data, position = data[done:], position + done
            return source.nbytes
        with mmap.mmap(self._file(file), file.nbytes) as mapped:
            whole = torch.frombuffer(mapped, dtype=spec.dtype, count=spec.shape.numel(), offset=begin)
            whole.as_strided(part.extents, part.far_strides, part.far_start).copy_(source)
            del whole  # it lets go of the mapping
        return source.nbytes

    def sync(self) -> None:
        """What this rank wrote is on the disk."""
        for descriptor in self._open.values():
            os.fsync(descriptor)
        self.close()

    def close(self) -> None:
        while self._open:
            os.close(self._open.popitem()[1])

    def publish(self) -> None:
        """What rank 0 does when all have written: the files get their names, and leftovers of an earlier export go."""
        wanted = {file.name for file in self.files}
        index = self.folder / INDEX
        if len(self.files) > 1:  # an index of before would name files of both
            index.unlink(missing_ok=True)
            sync_directory(self.folder)
        for file in self.files:
            os.replace(self._partial(file), self.folder / file.name)
        if len(self.files) > 1:
            sync_directory(self.folder)
            self._write_index(index)
        else:
            index.unlink(missing_ok=True)
        for path in self.folder.iterdir():
            if path.name not in wanted and (_NUMBERED.fullmatch(path.name) or path.name == SINGLE):
                path.unlink()
        sync_directory(self.folder)

    def _write_index(self, index: Path) -> None:
        """All of it or nothing."""
        partial = self.folder / f".{INDEX}.partial"
        with partial.open("w") as file:
            file.write(json.dumps(self._index(), indent=2, sort_keys=True) + "\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, index)

    def discard(self) -> None:
        """What rank 0 does when something failed."""
        self.close()
        for path in (*map(self._partial, self.files), self.folder / f".{INDEX}.partial"):
            path.unlink(missing_ok=True)

    def _index(self) -> dict[str, object]:
        sizes = self._specs.values()
        about = {"total_size": sum(spec.nbytes for spec in sizes), "total_parameters": sum(s.shape.numel() for s in sizes)}
        return {"metadata": about, "weight_map": {key: file.name for key, file in self._places.items()}}

    def _partial(self, file: OutFile) -> Path:
        return self.folder / f".{file.name}.partial"

    def _file(self, file: OutFile) -> int:
        if file.name not in self._open:
            self._open[file.name] = os.open(self._partial(file), self._flags)
        return self._open[file.name]
