"""Reads a checkpoint's files: verifies what is about to be used, and gives runs of tensors.

[Note: twice]
Nothing of a model is changed before all that it will take is known to be whole. What can be undone, and what there is room for
beside the old values, is read once: [Note: once] in waiting.py. The rest is read twice: once to verify it, block by block with
several threads, each rank another part; then again for what each rank owns. There are two ways to do that. Through the page
cache, the second time comes from there as far as it holds the files; it goes through the model backwards, so that of files
larger than the cache it meets those that were read last. Past the page cache, both times come from the drive: on a fast one
that is sooner done than filling the cache once. A few blocks are read either way, and what is left goes the faster way
(``_try_both``). None of it costs memory of this process beyond the buffers; a few blocks that were verified stay in them
(``keeps``), which is all of a small model.
"""

import contextlib
import threading
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from unwall.checkpoint.boxes import Part, overlaps
from unwall.checkpoint.checksums import BLOCK_BYTES, checked_runs
from unwall.checkpoint.copying import copy_flat
from unwall.checkpoint.errors import CheckpointError
from unwall.checkpoint.in_file import Bounce, EndedError, InFile
from unwall.checkpoint.manifest import Manifest, Tensor
from unwall.checkpoint.validation import check_files
from unwall.native.checksum import crc32

THREADS = 4
TRIED_FROM = 96
"""How many blocks there must be for it to pay to try both ways. Fewer are read past the page cache, unless it is one."""
CACHE_WORTH = 1.2
"""How many times longer a first reading through the page cache may take, because a second one costs little then."""
KEPT_BLOCKS = 16
"""Of what was verified, for whoever reads it next."""
GAP_BYTES = 64 << 10
"""What lies between two runs is read with them when it is at most this."""


@dataclass(frozen=True)
class Run:
    """Bytes with a checksum."""

    offset: int
    nbytes: int
    crc: int
    tensor: Tensor

    @property
    def end(self) -> int:
        return self.offset + self.nbytes


_Block = tuple[tuple[str, int], list[Run]]
"""File and number, and what is in it."""


@dataclass(frozen=True)
class Wanted:
    """Elements of a tensor, and the flat host memory of the same dtype that they go to."""

    tensor: Tensor
    part: Part
    into: torch.Tensor


@dataclass(frozen=True)
class FileBytes:
    """Where wanted bytes lie, and where they go."""

    file: str
    offset: int
    into: torch.Tensor
    tensor: Tensor

    @property
    def end(self) -> int:
        return self.offset + self.into.numel()


class CheckpointFiles:
    """The open files of one checkpoint. Any thread may read."""

    def __init__(self, directory: Path, manifest: Manifest) -> None:
        """CheckpointError where a file is missing, or not the one that was written."""
        self.directory = directory
        self.manifest = manifest
        self.past_cache = False
        """Whether large reads go past the page cache. See [Note: twice]."""
        check_files(directory, manifest)
        self._files: dict[str, InFile] = {}
        self._lock = threading.Lock()
        self._spare: list[Bounce] = []
        self.keeps = False
        """Whether ``verify`` keeps some of what it reads, at most ``KEPT_BLOCKS``, for whoever reads it next."""
        self._kept: dict[tuple[str, int], tuple[int, int, int, Bounce]] = {}
        """By file and number of the block: from where to where in the file; where in the buffer, and the buffer."""

    def __enter__(self) -> "CheckpointFiles":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Nobody reads any more."""
        with self._lock:
            while self._files:
                self._files.popitem()[1].close()
            self._kept, self._spare = {}, []

    @property
    def kept_blocks(self) -> int:
        """How many buffers ``keeps`` has taken."""
        return len(self._kept)

    def read(self, tensor: Tensor, part: Part, into: torch.Tensor) -> None:
        """Elements of a tensor, in the order of ``part``, into flat host memory of the same dtype."""
        for run in places(Wanted(tensor, part, into)):
            self._fill(run)

    def read_whole(self, tensor: Tensor) -> torch.Tensor:
        """A small tensor, all of it."""
        found = torch.empty(tensor.shape, dtype=tensor.dtype)
        if found.numel():
            self.read(tensor, Part.whole(tensor.shape), found.view(-1))
        return found

    def read_all(self, wanted: Iterable[Wanted]) -> None:
        """The same for many, the faster way that ``verify`` found."""
        runs = [run for one in wanted for run in places(one)]
        if self._kept:
            runs = [part for run in runs for part in cut_at_blocks(run) if not self._was_kept(part)]
        if not self.past_cache:
            for run in runs:
                self._fill(run)
            return
        for near in _near_each_other(runs):
            low, nbytes = near[0].offset, max(run.end for run in near) - near[0].offset
            with self.bounce() as bounce:
                first = self.fetch(near[0].file, low, nbytes, near[0].tensor, bounce, past_cache=True)
                for run in near:
                    copy_flat(run.into, bounce.bytes[first + run.offset - low : first + run.end - low])

    def _was_kept(self, run: FileBytes) -> bool:
        """Bytes that ``verify`` has kept are copied from there."""
        found = self._kept.get((run.file, run.offset // BLOCK_BYTES))
        if found is None or not found[0] <= run.offset < run.end <= found[1]:
            return False
        low, _, first, bounce = found
        copy_flat(run.into, bounce.bytes[first + run.offset - low : first + run.end - low])
        return True

    def verify(self, tensors: Iterable[Tensor], share: int = 0, shares: int = 1) -> None:
        """Reads this rank's share of these tensors' bytes. CheckpointError, naming file and tensor, where one is wrong."""
        blocks = sorted(runs_of_blocks(tensors).items())
        mine = blocks[len(blocks) * share // shares : len(blocks) * (share + 1) // shares]
        with ThreadPoolExecutor(THREADS, thread_name_prefix="unwall load") as threads:
            if len(mine) >= TRIED_FROM:
                mine = self._try_both(threads, mine)
            elif len(mine) > 1:
                self.past_cache = True
            self._check_all(threads, mine)

    def _try_both(self, threads: ThreadPoolExecutor, blocks: list[_Block]) -> list[_Block]:
        """Settles ``past_cache`` with the first blocks. Gives the others."""
        took = []
        for turn, past_cache in enumerate((False, True, False, True)):  # the first two are for the buffers' pages
            self.past_cache = past_cache
            took.append(self._check_all(threads, blocks[turn * THREADS : (turn + 1) * THREADS]))
        self.past_cache = took[2] > CACHE_WORTH * took[3]
        return blocks[4 * THREADS :]

    def _check_all(self, threads: ThreadPoolExecutor, blocks: list[_Block]) -> float:
        """Gives the seconds that all threads together have spent with reading."""
        jobs = [threads.submit(self._check, file, runs) for (file, _), runs in blocks]
        try:
            return sum(job.result() for job in jobs)
        except BaseException:
            for job in jobs:
                job.cancel()
            raise

    def _check(self, file: str, runs: Sequence[Run]) -> float:
        low, bounce = runs[0].offset, self._take_bounce()
        start = time.perf_counter()
        first = self.fetch(file, low, runs[-1].end - low, runs[0].tensor, bounce, self.past_cache)
        took = time.perf_counter() - start
        for run in runs:
            if crc32(bounce.bytes.data_ptr() + first + run.offset - low, run.nbytes) != run.crc:
                raise self.damaged(file, run)
        with self._lock:
            if self.keeps and len(self._kept) < KEPT_BLOCKS:
                self._kept[file, low // BLOCK_BYTES] = (low, runs[-1].end, first, bounce)
            else:
                self._spare.append(bounce)
        return took

    def damaged(self, file: str, run: Run) -> CheckpointError:
        """What is said of bytes that are not those that were written."""
        return CheckpointError(
            f"{self.directory / file} is damaged: {run.tensor.label} does not have its checksum "
            f"(bytes {run.offset} to {run.end}). Nothing was changed; load another checkpoint"
        )

    def _fill(self, run: FileBytes) -> None:
        with self._named(run.file, run.tensor):
            self._file(run.file).fill(run.offset, memoryview(run.into.numpy()))  # type: ignore[arg-type]

    def fetch(self, file: str, offset: int, nbytes: int, tensor: Tensor, into: Bounce, past_cache: bool) -> int:
        """At most a block of a file. Gives where in ``into`` it begins."""
        with self._named(file, tensor):
            if past_cache:
                return self._file(file).fetch(offset, nbytes, into)
            self._file(file).fill(offset, into.view[:nbytes])
            return 0

    @contextlib.contextmanager
    def bounce(self) -> Iterator[Bounce]:
        """A buffer that is used again."""
        found = self._take_bounce()
        try:
            yield found
        finally:
            with self._lock:
                self._spare.append(found)

    def _take_bounce(self) -> Bounce:
        with self._lock:
            return self._spare.pop() if self._spare else Bounce(BLOCK_BYTES)

    @contextlib.contextmanager
    def _named(self, file: str, tensor: Tensor) -> Iterator[None]:
        """Errors name file and tensor."""
        try:
            yield
        except OSError as error:
            raise CheckpointError(f"{tensor.label} in {self.directory / file} cannot be read: {error}") from error
        except EndedError as error:
            raise CheckpointError(f"{self.directory / file} {error}, in the middle of {tensor.label}") from error

    def _file(self, name: str) -> InFile:
        with self._lock:
            if name not in self._files:
                self._files[name] = InFile(self.directory / name)
            return self._files[name]


def places(wanted: Wanted) -> Iterator[FileBytes]:
    """Every run of a file that is wanted."""
    into, item = wanted.into.view(torch.uint8), wanted.tensor.dtype.itemsize
    for piece in wanted.tensor.pieces:
        for run in overlaps(wanted.part, piece.part):
            target = into[run.first * item : (run.first + run.numel) * item]
            yield FileBytes(piece.file, piece.offset + run.second * item, target, wanted.tensor)


def _near_each_other(runs: list[FileBytes]) -> Iterator[list[FileBytes]]:
    """Runs that are read at once, at most a block. A longer run is cut."""
    near: list[FileBytes] = []
    low = end = 0
    for run in sorted((part for run in runs for part in cut_at_blocks(run)), key=lambda run: (run.file, run.offset)):
        if near and (run.file != near[0].file or run.offset - end > GAP_BYTES or run.end - low > BLOCK_BYTES):
            yield near
            near = []
        if not near:
            low = end = run.offset
        near.append(run)
        end = max(end, run.end)
    if near:
        yield near


def cut_at_blocks(run: FileBytes) -> Iterator[FileBytes]:
    """The same bytes, cut where a block of the file ends."""
    for start, nbytes in checked_runs(run.offset, run.into.numel()):
        at = start - run.offset
        yield replace(run, offset=start, into=run.into[at : at + nbytes])


def runs_of_blocks(tensors: Iterable[Tensor]) -> dict[tuple[str, int], list[Run]]:
    """What has to be checked in each block of each file, in the order of the bytes."""
    found: dict[tuple[str, int], list[Run]] = defaultdict(list)
    for tensor in tensors:
        for piece in tensor.pieces:
            runs = checked_runs(piece.offset, tensor.nbytes(piece))
            for (offset, nbytes), value in zip(runs, piece.crcs, strict=True):
                found[piece.file, offset // BLOCK_BYTES].append(Run(offset, nbytes, value, tensor))
    for listed in found.values():
        listed.sort(key=lambda run: run.offset)
    return found
