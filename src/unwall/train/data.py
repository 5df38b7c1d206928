"""All samples of a run, over all files, by number."""

import bisect
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from unwall.terminal import say
from unwall.train.errors import TrainError
from unwall.train.files import BrokenSampleError, Rows, open_rows
from unwall.train.order import Order
from unwall.train.tokens import Document, Encoder

NAMED_SAMPLES = 10
"""Skipped samples that are named; the others are only counted."""


class Data:
    """Samples, read one at a time. What cannot be read is skipped and named, or with ``strict`` an error."""

    def __init__(self, files: Sequence[Rows], encoder: Encoder, strict: bool, length: int | None = None) -> None:
        """``length``: tokens of a sequence, which is as much as a sample may have before its answer begins."""
        self._files = files
        self._length = length
        self._encoder = encoder
        self._strict = strict
        self._ends = list(accumulate(file.rows for file in files))
        self.size = self._ends[-1] if self._ends else 0
        self.broken: dict[int, str] = {}
        """Samples that were skipped, and why."""
        if not self.size:
            raise TrainError(f"{', '.join(str(file.path) for file in files)}: no samples in it; give a file that is not empty")

    def order(self, seed: int, *, shuffle: bool = True) -> Order:
        chunks = [chunk for file in self._files for chunk in file.chunks]
        return Order([rows for rows, _ in chunks], [nbytes for _, nbytes in chunks], seed, shuffle=shuffle)

    def read(self, sample: int) -> Document | None:
        """Its tokens. None where there is nothing to learn from."""
        file, row = self._place(sample)
        try:
            record = file.read(row)
            document = None if record is None else self._encoder.encode(record)
            _check_answer(document, self._length)
        except BrokenSampleError as error:
            said = f"{file.where(row)}: {error}"
            if self._strict:
                raise TrainError(f"{said}; mend it, or leave out --strict to skip such samples") from None
            self.broken[sample] = said
            return None
        return document

    def where(self, sample: int) -> str:
        """How a person finds a sample."""
        file, row = self._place(sample)
        return file.where(row)

    def look(self, count: int = 8) -> None:
        """Reads samples until one can be used: the first ones, then some from all over, then what is left unless any of
        them is broken. TrainError where there is none."""
        some = dict.fromkeys([*range(min(count, self.size)), *range(0, self.size, max(1, self.size // count))])
        if any(self.read(sample) is not None for sample in some):
            return
        if not self.broken:
            if any(self.read(sample) is not None for sample in range(count, self.size)):
                return
            some = dict.fromkeys(range(self.size))
        first = next(iter(self.broken.values()), f"{self._files[0].path}: all samples are empty, or hold no answer")
        many = f"none of {self.size} samples" if len(some) == self.size else f"none of {len(some)} samples from all over it"
        raise TrainError(f"{many} can be used: {first}")

    def to_dict(self) -> list[dict[str, Any]]:
        """For JSON: what tells this data from other data."""
        return [{"path": str(file.path), "bytes": _size(file.path), "rows": file.rows} for file in self._files]

    def _place(self, sample: int) -> tuple[Rows, int]:
        number = bisect.bisect_right(self._ends, sample)
        return self._files[number], sample - (self._ends[number - 1] if number else 0)


def _check_answer(document: Document | None, length: int | None) -> None:
    """BrokenSampleError where all that counts would be cut off."""
    if length is None or document is None or document.answers is None or any(document.answers[1:length]):
        return
    begins = document.answers.index(True, 1)
    raise BrokenSampleError(f"its answer begins behind {begins} tokens, a sequence ends at {length}: use a longer --seq")


def name_broken(broken: dict[int, str]) -> None:
    """This rank's. They go to the standard error output, so that they can be kept."""
    for said in list(broken.values())[:NAMED_SAMPLES]:
        say(f"unwall: skipped: {said}", error=True)
    if len(broken) > NAMED_SAMPLES:
        say(f"unwall: skipped: {len(broken) - NAMED_SAMPLES} more", error=True)


def _size(path: Path) -> int:
    if path.is_dir():
        return sum(entry.stat().st_size for entry in path.rglob("*") if entry.is_file())
    return path.stat().st_size


def open_data(
    paths: Sequence[Path], index: Path, encoder: Encoder, strict: bool, split: str = "train", length: int | None = None
) -> Data:
    """Of files whose indices are made."""
    return Data([open_rows(path, index, split) for path in paths], encoder, strict, length)
