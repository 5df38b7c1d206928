"""States of a group as they are read for a checkpoint: run by run of this rank's elements, from whatever tier they live on.

[Note: lots]
A lot is one state of one group, in the precision it is stored in: the master (of which bf16 keeps two halves, joined on the
way), or a state of an optimizer. It knows its blocks as they were when the save began: an update that came later may have put
others in their place. Each lot is read in chunks of at most ``CHUNK_ELEMENTS``, a few ahead, so a state on disk or on an
accelerator takes host memory for these chunks only.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from unwall.native.lean import BLOCK
from unwall.native.library import DiskError
from unwall.native.memory import HostMemory
from unwall.optim.seen_states import SeenState
from unwall.shards.group import Group
from unwall.shards.master import whole_remainder
from unwall.shards.states import MASTER, REMAINDER
from unwall.shards.store import Store
from unwall.tiers.block import Block, DiskBlock, MemoryBlock
from unwall.tiers.clone import DiskClone
from unwall.tiers.disk import named
from unwall.tiers.sizes import align_up
from unwall.tiers.ticket import Ticket
from unwall.tiers.tiers import Tiers

CHUNK_ELEMENTS = 1 << 21
CHUNKS_AHEAD = 6


@dataclass(frozen=True)
class Span:
    """Elements of a lot that belong to one piece."""

    piece: int
    """Its number in the file."""
    start: int
    """First element, counted in the lot."""
    numel: int


@dataclass(frozen=True)
class Held:
    """Elements in a block."""

    block: Block
    dtype: torch.dtype
    start: int
    """First element of the lot, counted in the block."""

    @staticmethod
    def of(store: Store) -> "Held":
        return Held(store.block, store.dtype, 0)


@dataclass
class Lot:
    """See [Note: lots]."""

    label: str
    held: tuple[Held, ...]
    """One, or the two halves of a split master."""
    spans: list[Span] = field(default_factory=list)
    """In the order of their elements, and of the file."""
    coded: SeenState | None = None
    """What is kept in another form than it is written in."""
    clone: DiskClone | None = None
    """Where its blocks on disk are read from instead of their tier."""

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32 if len(self.held) == 2 or self.coded is not None else self.held[0].dtype

    def seen(self, parts: list[torch.Tensor]) -> list[torch.Tensor]:
        """A chunk as it is written. Both halves of a split master have 16 bits."""
        if self.coded is not None:
            return [self.coded.decode(parts[0])]
        return parts if len(parts) == 1 else [parts[0], whole_remainder(parts[1])]


def master_lot(group: Group) -> Lot:
    """The parameters of a group in full precision."""
    label = f"parameters of group {group.name}"
    if group.has_state(MASTER):
        return Lot(label, (Held.of(group.store(MASTER)),))
    flat = Held(group.buffer.block, group.layout.dtype, group.own_start)
    half = flat if group.param is None else Held.of(group.param)
    if not group.has_state(REMAINDER):
        return Lot(label, (half,))
    return Lot(label, (half, Held.of(group.store(REMAINDER))))


class LotReader:
    """Reads lots through a few buffers of its own. For one thread."""

    def __init__(self, tiers: Tiers) -> None:
        self._tiers = tiers
        self._spare: list[torch.Tensor] = []

    def read(self, lot: Lot) -> Iterator[tuple[Span, tuple[torch.Tensor, ...]]]:
        """The lot's elements, span by span or in parts of spans, in order, as flat tensors in host memory: one, or the two
        halves of a split master. They are good until the next ones are asked for."""
        chunks = deque(_chunks(lot.spans))
        coming: deque[tuple[tuple[int, int], list[_Arrival]]] = deque()
        position = 0
        while chunks or coming:
            while chunks and len(coming) < CHUNKS_AHEAD:
                low, high = chunks.popleft()
                coming.append(((low, high), [self._begin(lot, held, low, high) for held in lot.held]))
            (low, high), arrivals = coming.popleft()
            parts = lot.seen([arrival.finish() for arrival in arrivals])
            while position < len(lot.spans) and lot.spans[position].start < high:
                span = lot.spans[position]
                start, end = max(span.start, low), min(span.start + span.numel, high)
                yield span, tuple(part[start - low : end - low] for part in parts)
                if span.start + span.numel > high:
                    break
                position += 1
            for arrival in arrivals:
                arrival.give_back(self._spare)

    def _begin(self, lot: Lot, held: Held, low: int, high: int) -> "_Arrival":
        low, high = held.start + low, held.start + high
        if isinstance(held.block, MemoryBlock):
            values = held.block.view(held.dtype)[low:high]
            if not values.is_cuda:
                return _Arrival(values)
            buffer = self._buffer((high - low) * held.dtype.itemsize, pinned=True)
            target = buffer[: (high - low) * held.dtype.itemsize].view(held.dtype)
            target.copy_(values, non_blocking=True)
            event = torch.cuda.Event()
            event.record()
            return _Arrival(target, buffer, _Event(event))
        assert isinstance(held.block, DiskBlock)
        source = self._tiers.disk if lot.clone is None else lot.clone
        assert source is not None
        nbytes = (high - low) * held.dtype.itemsize
        buffer = self._buffer(nbytes)
        tickets = source.read(held.block, low * held.dtype.itemsize, buffer.data_ptr(), nbytes, keep=buffer)
        return _Arrival(buffer[:nbytes].view(held.dtype), buffer, *tickets, label=lot.label)

    def _buffer(self, nbytes: int, pinned: bool = False) -> torch.Tensor:
        if self._spare:
            return self._spare.pop()
        largest = CHUNK_ELEMENTS * 8
        assert nbytes <= largest
        if pinned:
            return torch.empty(largest, dtype=torch.uint8, pin_memory=True)
        return _memory(largest)


def _memory(nbytes: int) -> torch.Tensor:
    return torch.frombuffer(HostMemory(nbytes).buffer(), dtype=torch.uint8)


class _Event:
    """Work on a stream."""

    def __init__(self, event: "torch.cuda.Event") -> None:
        self._event = event

    def done(self) -> bool:
        return bool(self._event.query())

    def wait(self, timeout: float | None = None) -> None:  # noqa: ARG002 (a ticket's signature)
        self._event.synchronize()


class _Arrival:
    """Elements on their way into host memory."""

    def __init__(self, values: torch.Tensor, buffer: torch.Tensor | None = None, *tickets: Ticket, label: str = "") -> None:
        self._values = values
        self._buffer = buffer
        self._tickets = tickets
        self._label = label

    def finish(self) -> torch.Tensor:
        try:
            for ticket in self._tickets:
                ticket.wait()
        except DiskError as error:
            raise named(error, f"reading the {self._label}") from error
        return self._values

    def give_back(self, spare: list[torch.Tensor]) -> None:
        if self._buffer is not None:
            spare.append(self._buffer)


def _chunks(spans: list[Span]) -> Iterator[tuple[int, int]]:
    """Runs of at most ``CHUNK_ELEMENTS`` that hold all spans; each begins at a multiple of a page in every dtype."""
    if not spans:
        return
    end = align_up(spans[-1].start + spans[-1].numel, BLOCK)  # what is kept in blocks is read in whole ones
    low = spans[0].start // 4096 * 4096
    while low < end:
        high = min(low + CHUNK_ELEMENTS, end)
        if any(span.start < high and span.start + span.numel > low for span in spans):
            yield low, high
        low += CHUNK_ELEMENTS
