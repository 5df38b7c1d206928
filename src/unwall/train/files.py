"""Files of samples, each read at any row: .txt, .jsonl, .parquet, and directories of ``datasets``.

[Note: index of a file]
A file of lines has an index beside the run: where each row starts, 8 bytes per row, mapped into memory. Rank 0 makes it in one
pass over the file. A text file is one long text: its rows are pieces of about 16 KiB that end where a line ends.
"""

import glob
import hashlib
import json
import os
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from unwall.train.errors import TrainError, missing

PIECE_BYTES = 16 << 10
_BLOCK_BYTES = 16 << 20
KNOWN = (".txt", ".jsonl", ".parquet")
PACKED = (".gz", ".zst", ".bz2", ".xz", ".zip", ".tar")
CACHED_BYTES = 512 << 20
"""Row groups of a parquet file that stay in memory."""
COLUMNS = ("text", "prompt", "completion", "messages", "tools")
"""What a sample may have."""


class BrokenSampleError(ValueError):
    """A row that holds no sample."""


class Rows(Protocol):
    """One file."""

    path: Path
    rows: int
    chunks: list[tuple[int, int]]
    """(rows, bytes in memory) of each piece that is read at once; 0 bytes where rows are read alone."""

    def read(self, row: int) -> dict[str, Any] | None:
        """The sample; None for an empty line. BrokenSampleError where there is none."""
        ...

    def where(self, row: int) -> str:
        """How a person finds the row."""
        ...


def find_files(given: tuple[str, ...], option: str = "--data", out: str | None = None) -> list[Path]:
    """Every file that is meant, in a fixed order. TrainError where there is none. What the run itself writes (``out``) is
    no data, wherever it lies: the same command finds the same files again."""
    own = None if out is None else Path(out).resolve()
    found: list[Path] = []
    for name in given:
        if Path(name).exists():
            matched = _inside(Path(name), own)
        else:
            entries = (Path(entry) for entry in sorted(glob.glob(name, recursive=True)))
            matched = [path for entry in entries if not _is_below(entry, own) for path in _inside(entry, own)]
        if not matched:
            raise TrainError(f"{option} {name}: no such file")
        found += matched
    return found


def _is_below(path: Path, folder: Path | None) -> bool:
    return folder is not None and path.resolve().is_relative_to(folder)


def _inside(path: Path, own: Path | None) -> list[Path]:
    if not path.is_dir():
        if path.suffix in PACKED:
            raise TrainError(f"{path}: is compressed; unpack it first: data is {', '.join(KNOWN)} or a datasets directory")
        if path.suffix not in KNOWN:
            raise TrainError(f"{path}: data is {', '.join(KNOWN)} or a datasets directory; rename or convert it")
        if not os.access(path, os.R_OK):
            raise TrainError(f"{path}: cannot be read: permission denied")
        return [path]
    if is_dataset(path):
        return [path]
    files = (entry for entry in path.rglob("*") if entry.suffix in KNOWN and entry.is_file())
    listed = sorted(entry for entry in files if not _is_below(entry, own))
    if not listed:
        raise TrainError(f"{path}: a directory without {', '.join(KNOWN)} files in it, and not one of datasets")
    return listed


def is_dataset(path: Path) -> bool:
    """Whether ``save_to_disk`` of ``datasets`` wrote it."""
    return (path / "dataset_dict.json").is_file() or (path / "dataset_info.json").is_file()


def index_file(path: Path, folder: Path) -> Path:
    """Where the index of a file is kept: another one when the file changes."""
    status = path.stat()
    key = f"{path.resolve()}/{status.st_size}/{status.st_mtime_ns}/{path.suffix}"
    return folder / f"{hashlib.sha256(key.encode()).hexdigest()[:20]}.rows"


def make_index(path: Path, folder: Path) -> None:
    """Makes the index of a file of lines, where it is not there yet. See [Note: index of a file]."""
    if path.suffix not in (".txt", ".jsonl"):
        return
    target = index_file(path, folder)
    if target.exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    partial = target.with_suffix(f".{os.getpid()}")
    with partial.open("wb") as out:
        for starts in _line_starts(path) if path.suffix == ".jsonl" else _piece_starts(path):
            starts.astype("<u8").tofile(out)
    partial.replace(target)


def _line_starts(path: Path) -> Iterator[np.ndarray]:
    """Where each line starts, and at last where the file ends."""
    offset, ended = 0, True
    with path.open("rb") as file:
        while block := file.read(_BLOCK_BYTES):
            if offset == 0:
                yield np.zeros(1, dtype=np.uint64)
            starts = np.flatnonzero(np.frombuffer(block, dtype=np.uint8) == 10).astype(np.uint64) + np.uint64(offset + 1)
            offset += len(block)
            ended = block.endswith(b"\n")
            yield starts
    if not ended:
        yield np.array([offset], dtype=np.uint64)


def _piece_starts(path: Path) -> Iterator[np.ndarray]:
    """The same for the pieces of a text."""
    size, start = path.stat().st_size, 0
    with path.open("rb") as file:
        while start < size:
            yield np.array([start], dtype=np.uint64)
            file.seek(start + PIECE_BYTES)
            line = file.readline(PIECE_BYTES)
            start += PIECE_BYTES + len(line)
            if start < size and not line.endswith(b"\n"):  # no end of a line for long: cut between two characters
                while line and line[-1] & 0xC0 == 0x80:
                    line, start = line[:-1], start - 1
                start -= bool(line) and line[-1] >= 0xC0
    if size:
        yield np.array([size], dtype=np.uint64)


def open_rows(path: Path, folder: Path, split: str) -> Rows:
    """``split``: of a ``datasets`` directory that has several."""
    if path.is_dir():
        return DatasetRows(path, split)
    if path.suffix == ".parquet":
        return ParquetRows(path)
    return LineRows(path, index_file(path, folder))


class LineRows:
    """A .jsonl file: a row is a line. Or a .txt file: a row is a piece of the text."""

    def __init__(self, path: Path, index: Path) -> None:
        self.path = path
        empty = index.stat().st_size == 0
        self._starts = np.zeros(1, dtype="<u8") if empty else np.memmap(index, dtype="<u8", mode="r")
        self.rows = len(self._starts) - 1
        self.chunks = [(self.rows, 0)]
        self._file = path.open("rb")

    def read(self, row: int) -> dict[str, Any] | None:
        start, end = int(self._starts[row]), int(self._starts[row + 1])
        raw = os.pread(self._file.fileno(), end - start, start)
        try:
            text = raw.decode("utf-8-sig" if row == 0 else "utf-8")
        except UnicodeDecodeError as error:
            raise BrokenSampleError(f"is not UTF-8: {error.reason} at byte {error.start}; convert the file (iconv)") from None
        if not text.strip():
            return None
        if self.path.suffix == ".txt":
            return {"text": text}
        try:
            found = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise BrokenSampleError(f"is not JSON: {error}") from None
        if not isinstance(found, dict):
            raise BrokenSampleError(f"expected a JSON object, got {type(found).__name__}")
        return found

    def where(self, row: int) -> str:
        if self.path.suffix == ".txt":
            return f"{self.path}, bytes {int(self._starts[row])} to {int(self._starts[row + 1])}"
        return f"{self.path}:{row + 1}"


class ParquetRows:
    """A .parquet file, read by row groups; only the columns that are needed."""

    def __init__(self, path: Path) -> None:
        try:
            import pyarrow
            import pyarrow.parquet as parquet
        except ImportError:
            raise missing("pyarrow", f"{path}") from None
        try:
            self._file = parquet.ParquetFile(path, memory_map=True)
        except (pyarrow.ArrowInvalid, OSError) as error:
            raise TrainError(f"{path}: cannot be read as parquet: {_first_line(error)}") from None
        self.path = path
        meta = self._file.metadata
        self.rows = meta.num_rows
        groups = [meta.row_group(number) for number in range(meta.num_row_groups)]
        self.chunks = [(group.num_rows, group.total_byte_size) for group in groups]
        self._starts = np.concatenate(([0], np.cumsum([rows for rows, _ in self.chunks], dtype=np.int64)))
        self._columns = [name for name in self._file.schema_arrow.names if name in COLUMNS]
        if not self._columns:
            raise TrainError(f"{path}: has none of the columns {', '.join(COLUMNS)}; rename the one that holds the text")
        self._cache: OrderedDict[int, Any] = OrderedDict()

    def read(self, row: int) -> dict[str, Any] | None:
        group = int(np.searchsorted(self._starts, row, side="right")) - 1
        if group not in self._cache:
            self._cache[group] = self._file.read_row_group(group, columns=self._columns)
            while len(self._cache) > 1 and sum(table.nbytes for table in self._cache.values()) > CACHED_BYTES:
                self._cache.popitem(last=False)
        self._cache.move_to_end(group)
        found = self._cache[group].slice(row - int(self._starts[group]), 1).to_pylist()[0]
        return {name: value for name, value in found.items() if value is not None}

    def where(self, row: int) -> str:
        return f"{self.path}, row {row + 1}"


class DatasetRows:
    """A directory that ``save_to_disk`` of ``datasets`` wrote; it is mapped into memory."""

    def __init__(self, path: Path, split: str) -> None:
        try:
            import datasets
        except ImportError:
            raise missing("datasets", f"{path}") from None
        try:
            found: Any = datasets.load_from_disk(str(path))
        except (OSError, ValueError) as error:
            raise TrainError(f"{path}: cannot be read by datasets: {_first_line(error)}") from None
        if isinstance(found, dict):
            if split not in found:
                raise TrainError(f"{path}: has the splits {', '.join(found)}, and none is called {split}: give one's directory")
            found = found[split]
        self._data = found
        self.path, self.rows = path, len(found)
        self.chunks = [(self.rows, 0)]

    def read(self, row: int) -> dict[str, Any] | None:
        found = self._data[row]
        return {name: value for name, value in found.items() if name in COLUMNS and value is not None}

    def where(self, row: int) -> str:
        return f"{self.path}, row {row + 1}"


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
