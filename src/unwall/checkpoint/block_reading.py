"""States, read from a checkpoint's files and verified at once, each byte a single time.

[Note: block by block]
Checksums are over runs that end at the blocks of a file (checksums.py). So this goes through the files block by block, and
reads of each block all runs of which anything is wanted. On the way to its place, or to a buffer, a run is checked: one pass
over memory. The order is that of the states: a training that is resumed as it was goes through each file from its beginning to
its end. What has no place in memory that can be written directly (states on disk, other dtypes) is put in chunks, each when its
last byte is there. A block may hold bytes of chunks that come later; they get a buffer ahead of their turn while there are
some, otherwise the block is read once more when their turn has come. So memory stays bounded, whatever the layout is.
"""

from collections import defaultdict, deque
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import torch

from unwall.checkpoint.checksums import BLOCK_BYTES
from unwall.checkpoint.copying import copy_flat
from unwall.checkpoint.goals import Goal, Source, gaps, sources
from unwall.checkpoint.in_file import Bounce
from unwall.checkpoint.lots import CHUNK_ELEMENTS
from unwall.checkpoint.reader import THREADS, CheckpointFiles, Run, runs_of_blocks
from unwall.native.checksum import crc32, crc32_copy, crc32_split
from unwall.native.memory import HostMemory
from unwall.tiers.sizes import align_up

BLOCKS_AHEAD = 6
"""Blocks that are asked for, or read and not yet taken."""
BUFFERS = 24
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
        with ThreadPoolExecutor(THREADS, thread_name_prefix="unwall load") as threads:
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
        parts = sorted(parts, key=lambda part: part[0].offset)
        low, high = parts[0][0].offset, max(source.offset + source.nbytes for source, _ in parts)
        runs = [run for run in self._known[key] if run.offset < high and run.end > low]
        low, high = runs[0].offset, runs[-1].end
        with self._files.bounce() as bounce:
            first = self._files.fetch(file, low, high - low, runs[0].tensor, bounce, past_cache=True)
            at = 0
            for run in runs:
                inside = at
                while at < len(parts) and parts[at][0].offset < run.end:
                    at += 1
                if at > inside and _check(run, parts[inside:at], bounce, first - low) != run.crc:
                    raise self._files.damaged(file, run)


def _writable(goal: Goal) -> Goal:
    """Floats are taken apart where they lie: where they are cut by the blocks of a file, the goal goes through a buffer."""
    offsets = (piece.offset for tensor in goal.tensors.values() for piece in tensor.pieces)
    if goal.halves is None or not any(offset % 4 for offset in offsets):
        return goal
    return Goal(goal.group, goal.tensors, goal.dtype, goal.otherwise, goal.put)


def _check(run: Run, parts: list[_Part], bounce: Bounce, shift: int) -> int:
    """Copies what is wanted of a run. Gives the checksum of all of it."""
    address, crc, done, shared = bounce.bytes.data_ptr() + shift, 0, run.offset, False
    for source, chunk in parts:
        shared |= source.offset < done
        if source.offset > done:
            crc = crc32(address + done, source.offset - done, crc)
        crc = _copy(chunk, source, bounce, shift, crc)
        done = max(done, source.offset + source.nbytes)
    if shared:  # two parameters take the same bytes: tied when they were saved
        return crc32(address + run.offset, run.end - run.offset)
    return crc32(address + done, run.end - done, crc) if done < run.end else crc


def _copy(chunk: _Chunk, source: Source, bounce: Bounce, shift: int, crc: int) -> int:
    goal, start = chunk.goal, bounce.bytes.data_ptr() + shift + source.offset
    if goal.halves is not None:
        half, rest = (part.data_ptr() + source.at // 2 for part in goal.halves)
        return crc32_split(half, rest, start, source.nbytes // 4, crc)
    target = goal.place if goal.place is not None else chunk.values
    at = source.at - chunk.low * goal.dtype.itemsize
    if target.device.type == "cpu":
        return crc32_copy(target.data_ptr() + at, start, source.nbytes, crc)
    read = bounce.bytes[shift + source.offset : shift + source.offset + source.nbytes]
    copy_flat(target.view(torch.uint8)[at : at + source.nbytes], read)
    return crc32(start, source.nbytes, crc)
