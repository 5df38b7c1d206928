"""Reads a checkpoint's files: verifies what is about to be used, and gives runs of tensors.

[Note: twice]
Nothing of a model is changed before all that it will take is known to be whole. So the files are read twice: once to verify
them, block by block with several threads, each rank another part; then again for what each rank owns. The second time comes
from the page cache as far as that holds them, which costs no memory of this process. It goes through the model backwards, so
that of files larger than the cache it meets those that were read last.
"""

import os
import threading
from collections import defaultdict
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

from unwall.checkpoint.boxes import Part, overlaps
from unwall.checkpoint.checksums import BLOCK_BYTES, checked_runs, crc
from unwall.checkpoint.errors import CheckpointError
from unwall.checkpoint.manifest import Manifest, Tensor
from unwall.checkpoint.validation import check_files, open_file
from unwall.native.memory import HostMemory

THREADS = 4


@dataclass(frozen=True)
class _Run:
    """Bytes with a checksum."""

    offset: int
    nbytes: int
    crc: int
    tensor: Tensor


class CheckpointFiles:
    """The open files of one checkpoint. Any thread may read."""

    def __init__(self, directory: Path, manifest: Manifest) -> None:
        """CheckpointError where a file is missing, or not the one that was written."""
        self.directory = directory
        self.manifest = manifest
        check_files(directory, manifest)
        self._descriptors: dict[str, int] = {}
        self._lock = threading.Lock()

    def __enter__(self) -> "CheckpointFiles":
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            while self._descriptors:
                os.close(self._descriptors.popitem()[1])

    def read(self, tensor: Tensor, part: Part, into: torch.Tensor) -> None:
        """Elements of a tensor, in the order of ``part``, into flat host memory of the same dtype."""
        view = memoryview(into.view(torch.uint8).numpy())  # type: ignore[arg-type]
        item = tensor.dtype.itemsize
        for piece in tensor.pieces:
            for run in overlaps(part, piece.part):
                start = piece.offset + run.second * item
                self._fill(piece.file, start, view[run.first * item : (run.first + run.numel) * item], tensor)

    def read_whole(self, tensor: Tensor) -> torch.Tensor:
        """A small tensor, all of it."""
        found = torch.empty(tensor.shape, dtype=tensor.dtype)
        if found.numel():
            self.read(tensor, Part.whole(tensor.shape), found.view(-1))
        return found

    def verify(self, tensors: Iterable[Tensor], share: int = 0, shares: int = 1) -> None:
        """Reads this rank's share of these tensors' bytes. CheckpointError, naming file and tensor, where one is wrong."""
        blocks = sorted(_blocks(tensors).items())
        mine = blocks[len(blocks) * share // shares : len(blocks) * (share + 1) // shares]
        local = threading.local()

        def check(block: tuple[tuple[str, int], list[_Run]]) -> None:
            if not hasattr(local, "view"):
                local.view = memoryview(HostMemory(BLOCK_BYTES).buffer()).cast("B")
            self._check(block[0][0], block[1], local.view)

        with ThreadPoolExecutor(THREADS, thread_name_prefix="unwall load") as threads:
            jobs = [threads.submit(check, block) for block in mine]
            try:
                for job in jobs:
                    job.result()
            except BaseException:
                for job in jobs:
                    job.cancel()
                raise

    def _check(self, file: str, runs: Sequence[_Run], view: memoryview) -> None:
        low, high = runs[0].offset, runs[-1].offset + runs[-1].nbytes
        self._fill(file, low, view[: high - low], runs[0].tensor)
        for run in runs:
            if crc(view[run.offset - low : run.offset - low + run.nbytes]) != run.crc:
                raise CheckpointError(
                    f"{self.directory / file} is damaged: {run.tensor.label} does not have its checksum "
                    f"(bytes {run.offset} to {run.offset + run.nbytes}). Nothing was changed; load another checkpoint"
                )

    def _fill(self, file: str, offset: int, view: memoryview, tensor: Tensor) -> None:
        descriptor = self._descriptor(file)
        while view:
            try:
                got = os.preadv(descriptor, [view], offset)
            except OSError as error:
                raise CheckpointError(f"{tensor.label} in {self.directory / file} cannot be read: {error}") from error
            if got == 0:
                raise CheckpointError(f"{self.directory / file} ends at byte {offset}, in the middle of {tensor.label}")
            view, offset = view[got:], offset + got

    def _descriptor(self, file: str) -> int:
        with self._lock:
            if file not in self._descriptors:
                self._descriptors[file] = open_file(self.directory / file)
            return self._descriptors[file]


def _blocks(tensors: Iterable[Tensor]) -> dict[tuple[str, int], list[_Run]]:
    """What has to be checked in each block of each file, in the order of the bytes."""
    found: dict[tuple[str, int], list[_Run]] = defaultdict(list)
    for tensor in tensors:
        for piece in tensor.pieces:
            runs = checked_runs(piece.offset, tensor.nbytes(piece))
            for (offset, nbytes), value in zip(runs, piece.crcs, strict=True):
                found[piece.file, offset // BLOCK_BYTES].append(_Run(offset, nbytes, value, tensor))
    for listed in found.values():
        listed.sort(key=lambda run: run.offset)
    return found
