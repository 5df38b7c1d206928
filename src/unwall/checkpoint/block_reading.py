"""States, read from a checkpoint's files and verified at once, each byte a single time.

[Note: block by block]
Checksums are over runs that end at the blocks of a file (checksums.py). So this goes through the files block by block, and
reads of each block all runs of which anything is wanted. On the way to its place, or to a buffer, a run is checked: one pass
over memory. A reader takes a few MiB of its block at a time: what it reads into stays small, and the readers do not all
check at once, which would leave the drive without work. The order is that of the states: a training that is resumed as it was
goes through each file from its beginning to its end. What has no place in memory that can be written directly (states on disk,
other dtypes) is put in chunks, each when its last byte is there. A block may hold bytes of chunks that come later; they get a
buffer ahead of their turn while there are some, otherwise the block is read once more when their turn has come. So memory
stays bounded, whatever the layout is.
"""

import itertools
from bisect import bisect_left
from collections import defaultdict, deque
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import torch

from unwall.checkpoint.checksums import BLOCK_BYTES, checked_runs
from unwall.checkpoint.copying import copy_flat
from unwall.checkpoint.goals import Goal, Source, gaps, sources
from unwall.checkpoint.in_file import Bounce
from unwall.checkpoint.lots import CHUNK_ELEMENTS
from unwall.checkpoint.reader import CheckpointFiles, Run, runs_of_blocks
from unwall.native.checksum import crc32, crc32_copy, crc32_split
from unwall.native.memory import HostMemory
from unwall.tiers.sizes import align_up

READERS = 16
"""Threads. More than a drive needs, because some of them check while others read, or wait for a processor."""
READ_BYTES = 4 << 20
"""What a reader takes at once of its block."""
BLOCKS_AHEAD = READERS + 2
"""Blocks that are asked for, or read and not yet taken."""
BUFFERS = 22
"""Less those that the files keep of what was verified: both have a block's size."""
FEWEST_BUFFERS = 8
FOR_THE_NEXT = 4
"""Buffers that only chunks get whose turn has come."""

_Key = tuple[str, int]
"""A block: its file and its number."""


@dataclass(eq=False)
class _Chunk:
    """Elements of a goal that are put at once: all of them where they are written directly."""

    goal: Goal
    low: int
    high: int
    blocks: dict[_Key, None] = field(default_factory=dict)
    """Where bytes of it lie that were not asked for yet."""
    missing: int = 0
    """Bytes that are still to come."""
    buffer: torch.Tensor | None = None
    is_put: bool = False

    @property
    def direct(self) -> bool:
        return self.goal.place is not None or self.goal.halves is not None

    @property
    def values(self) -> torch.Tensor:
        """Its elements in the buffer."""
        assert self.buffer is not None
        return self.buffer[: (self.high - self.low) * self.goal.dtype.itemsize].view(self.goal.dtype)

    def fill_gaps(self) -> None:
        for low, high in gaps(self.goal, self.low, self.high):
            if self.goal.halves is not None:
                for half in self.goal.halves:
                    half[low:high].zero_()
            elif self.goal.place is not None:
                self.goal.place[low:high].fill_(self.goal.otherwise)
            else:
                self.values[low - self.low : high - self.low].fill_(self.goal.otherwise)


_Part = tuple[Source, _Chunk]


class BlockReading:
    """See [Note: block by block]. For one thread, which takes what others read."""

    def __init__(self, files: CheckpointFiles, goals: Iterable[Goal]) -> None:
        self._files = files
        self._chunks: list[_Chunk] = []
        self._left: dict[_Key, list[_Part]] = defaultdict(list)
        """What is still wanted of each block."""
        self._spare: list[torch.Tensor] = []
        self._bounces: list[Bounce] = []
        """What readers read into."""
        self._open = 0
        self._buffers = max(BUFFERS - files.kept_blocks, min(BUFFERS, FEWEST_BUFFERS))
        self._under_way: deque[tuple[list[_Part], Future[None]]] = deque()
        goals = list(goals)
        for goal in goals:
            self._cut(_writable(goal))
        self._known = runs_of_blocks({id(tensor): tensor for goal in goals for tensor in goal.tensors.values()}.values())

    def _cut(self, goal: Goal) -> None:
        whole = goal.place is not None or goal.halves is not None
        size = goal.group.own_numel if whole else CHUNK_ELEMENTS
        for low in range(0, goal.group.own_numel, size):
            chunk = _Chunk(goal, low, min(low + size, goal.group.own_numel))
            for source in sources(goal, low, chunk.high):
                key = source.file, source.offset // BLOCK_BYTES
                self._left[key].append((source, chunk))
                chunk.blocks[key] = None
                chunk.missing += source.nbytes
            self._chunks.append(chunk)

    def run(self) -> None:
        """CheckpointError, naming file and tensor, where a byte is wrong: what was put by then is of no use."""
        with ThreadPoolExecutor(READERS, thread_name_prefix="unwall load") as threads:
            try:
                for chunk in self._chunks:
                    self._read_chunk(threads, chunk)
                while self._under_way:
                    self._take()
            except BaseException:
                for _, job in self._under_way:
                    job.cancel()
                raise

    def _read_chunk(self, threads: ThreadPoolExecutor, chunk: _Chunk) -> None:
        if chunk.is_put:  # ahead of its turn
            return
        if chunk.direct:
            chunk.fill_gaps()
        elif chunk.buffer is None:
            while self._open >= self._buffers:
                self._take()
            self._give_buffer(chunk)
        if not chunk.missing and not chunk.direct:
            self._put(chunk)
        for key in list(chunk.blocks):
            if key in chunk.blocks:
                while len(self._under_way) >= BLOCKS_AHEAD:
                    self._take()
                now = self._wanted_now(key)
                self._under_way.append((now, threads.submit(self._read, key, now)))

    def _wanted_now(self, key: _Key) -> list[_Part]:
        """What of a block can be read now: everything, but for chunks that get no buffer yet."""
        now: list[_Part] = []
        later: list[_Part] = []
        for part in self._left[key]:
            if self._is_open(part[1]):
                part[1].blocks.pop(key, None)
                now.append(part)
            else:
                later.append(part)
        self._left[key] = later
        return now

    def _is_open(self, chunk: _Chunk) -> bool:
        """Whether bytes can go there: it may get a buffer for them now."""
        if chunk.direct or chunk.buffer is not None:
            return True
        if self._open >= self._buffers - FOR_THE_NEXT:
            return False
        self._give_buffer(chunk)
        return True

    def _give_buffer(self, chunk: _Chunk) -> None:
        self._open += 1
        nbytes = align_up(CHUNK_ELEMENTS * 8)
        memory = self._spare.pop() if self._spare else torch.frombuffer(HostMemory(nbytes).buffer(), dtype=torch.uint8)
        chunk.buffer = memory
        chunk.fill_gaps()

    def _take(self) -> None:
        """What the oldest block under way holds is where it belongs."""
        parts, job = self._under_way.popleft()
        job.result()
        for source, chunk in parts:
            chunk.missing -= source.nbytes
            if not chunk.missing and not chunk.direct:
                self._put(chunk)

    def _put(self, chunk: _Chunk) -> None:
        chunk.goal.put(chunk.low, chunk.values)
        chunk.is_put = True
        assert chunk.buffer is not None
        self._spare.append(chunk.buffer)
        chunk.buffer = None
        self._open -= 1

    def _read(self, key: _Key, parts: list[_Part]) -> None:
        """On a thread of its own: one block, checked on the way to where it belongs."""
        file = key[0]
        parts = sorted(parts, key=_offset)
        checks = [check for run in self._known[key] if (check := _RunCheck(run, parts)).parts]
        low, high = checks[0].run.offset, checks[-1].run.end
        try:
            bounce = self._bounces.pop()
        except IndexError:
            bounce = Bounce(READ_BYTES)
        for start, nbytes in checked_runs(low, high - low, READ_BYTES):
            inside = [check for check in checks if check.run.offset < start + nbytes and check.run.end > start]
            if not inside:  # nothing of it is wanted
                continue
            first = self._files.fetch(file, start, nbytes, inside[0].run.tensor, bounce, past_cache=True)
            for check in inside:
                check.take(start, start + nbytes, bounce, first - start)
                if check.run.end <= start + nbytes and check.crc != check.run.crc:
                    raise self._files.damaged(file, check.run)
        self._bounces.append(bounce)


def _writable(goal: Goal) -> Goal:
    """Floats are taken apart where they lie: where they are cut by the blocks of a file, the goal goes through a buffer."""
    offsets = (piece.offset for tensor in goal.tensors.values() for piece in tensor.pieces)
    if goal.halves is None or not any(offset % 4 for offset in offsets):
        return goal
    return Goal(goal.group, goal.tensors, goal.dtype, goal.otherwise, goal.put)


def _offset(part: _Part) -> int:
    return part[0].offset


class _RunCheck:
    """A run, and what is wanted of it, while it is read."""

    def __init__(self, run: Run, parts: list[_Part]) -> None:
        """``parts``: of the whole block, sorted."""
        self.run = run
        self.parts = parts[bisect_left(parts, run.offset, key=_offset) : bisect_left(parts, run.end, key=_offset)]
        self.crc = 0
        """Of what was read by now."""
        ends = itertools.accumulate((source.offset + source.nbytes for source, _ in self.parts), max)
        self._shared = any(source.offset < end for (source, _), end in zip(self.parts[1:], ends, strict=False))
        """Two parameters take the same bytes: tied when they were saved."""

    def take(self, low: int, high: int, bounce: Bounce, shift: int) -> None:
        """Copies what is wanted of the run's bytes from ``low`` to ``high``, which the buffer holds from ``low + shift`` on."""
        low, high, address = max(low, self.run.offset), min(high, self.run.end), bounce.bytes.data_ptr() + shift
        crc, done = self.crc, low
        for source, chunk in self.parts:
            start, end = max(source.offset, low), min(source.offset + source.nbytes, high)
            if start < end:
                if start > done:
                    crc = crc32(address + done, start - done, crc)
                crc = _copy(chunk, source.at + start - source.offset, bounce.bytes[start + shift : end + shift], crc)
                done = max(done, end)
        if self._shared:
            self.crc = crc32(address + low, high - low, self.crc)
        else:
            self.crc = crc32(address + done, high - done, crc) if done < high else crc


def _copy(chunk: _Chunk, at: int, read: torch.Tensor, crc: int) -> int:
    """Bytes to where they belong: ``at`` counts from the start of the owned run. Gives the checksum, with what came before."""
    goal = chunk.goal
    if goal.halves is not None:
        half, rest = (part.data_ptr() + at // 2 for part in goal.halves)
        return crc32_split(half, rest, read.data_ptr(), read.numel() // 4, crc)
    target = goal.place if goal.place is not None else chunk.values
    at -= chunk.low * goal.dtype.itemsize
    if target.device.type == "cpu":
        return crc32_copy(target.data_ptr() + at, read.data_ptr(), read.numel(), crc)
    copy_flat(target.view(torch.uint8)[at : at + read.numel()], read)
    return crc32(read.data_ptr(), read.numel(), crc)
