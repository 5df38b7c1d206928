"""From a checkpoint's files into the states of groups, wherever they live, chunk by chunk of this rank's elements."""

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import torch

from unwall.checkpoint.copying import copy_flat
from unwall.checkpoint.lots import CHUNK_ELEMENTS, Held
from unwall.checkpoint.manifest import Tensor
from unwall.checkpoint.reader import THREADS, CheckpointFiles, Wanted
from unwall.checkpoint.spread import parts_of
from unwall.native.library import DiskError
from unwall.native.memory import HostMemory
from unwall.optim.seen_states import SeenState
from unwall.shards.group import Group
from unwall.shards.layout import Segment
from unwall.shards.master import make_master, rounded, split_into
from unwall.shards.states import MASTER, REMAINDER
from unwall.shards.store import Store
from unwall.tiers.block import DiskBlock, MemoryBlock
from unwall.tiers.disk import named
from unwall.tiers.sizes import align_up
from unwall.tiers.tiers import Tiers

CHUNKS_AHEAD = 4
CHUNK_BYTES = CHUNK_ELEMENTS * 8


@dataclass(frozen=True)
class Goal:
    """One state of one group, and what it is to become."""

    group: Group
    tensors: Mapping[int, Tensor]
    """Of each slot that is in the checkpoint."""
    dtype: torch.dtype
    otherwise: float
    """For elements that are not."""
    put: Callable[[int, torch.Tensor], None]
    """Takes elements from a position of the owned run on: flat, in host memory, in ``dtype``."""
    place: torch.Tensor | None = None
    """The owned run itself, where that is host memory of this dtype: it is read right there, without ``put``."""


@dataclass(frozen=True)
class Fresh:
    """A state in memory that has its first value everywhere, and what it is to become. See [Note: once]."""

    run: torch.Tensor
    """The owned run."""
    initial: float
    group: Group
    tensors: Mapping[int, Tensor]
    """Of each slot that is in the checkpoint, in the dtype of the run."""

    def wanted(self) -> Iterator[Wanted]:
        for segment in self.group.owned_segments():
            tensor = self.tensors.get(segment.slot)
            if tensor is not None:
                at = segment.shard_start
                for part in parts_of(self.group.params[segment.slot], segment.start, segment.numel):
                    yield Wanted(tensor, part, self.run[at : at + part.numel])
                    at += part.numel

    def undo(self) -> None:
        self.run.fill_(self.initial)


def fresh_state(group: Group, tensors: Mapping[int, Tensor], store: Store, initial: float) -> Fresh | None:
    """None where it is not in memory, or in another dtype in the checkpoint."""
    block = store.block
    if not isinstance(block, MemoryBlock) or any(tensor.dtype != store.dtype for tensor in tensors.values()):
        return None
    return Fresh(block.view(store.dtype), initial, group, tensors)


class Restorer:
    """Loads goals through a few buffers."""

    def __init__(self, tiers: Tiers, files: CheckpointFiles) -> None:
        self._tiers = tiers
        self._files = files
        self._spare: list[torch.Tensor] = []
        self._halves: tuple[torch.Tensor, torch.Tensor] | None = None

    def master(self, group: Group, tensors: Mapping[int, Tensor]) -> Goal:
        """The parameters of a group, and what its master has beside them."""
        exact = any(tensor.dtype is torch.float32 for tensor in tensors.values())
        if exact and group.layout.dtype is torch.bfloat16 and not group.has_state(REMAINDER):
            make_master(group)
        param = Held(group.buffer.block, group.layout.dtype, group.own_start)
        if group.param is not None:
            param = Held.of(group.param)
        if group.has_state(REMAINDER):
            rest = Held.of(group.store(REMAINDER))
            return Goal(group, tensors, torch.float32, 0.0, lambda start, values: self._put_split(param, rest, start, values))
        if group.has_state(MASTER):
            master = Held.of(group.store(MASTER))

            def put_both(start: int, values: torch.Tensor) -> None:
                self._put(master, start, values)
                self._put(param, start, values.to(param.dtype))

            return Goal(group, tensors, torch.float32, 0.0, put_both)
        wide = param.dtype if not param.dtype.is_floating_point else torch.promote_types(param.dtype, torch.float32)

        def put(start: int, values: torch.Tensor) -> None:
            self._put(param, start, rounded(values, param.dtype))

        return Goal(group, tensors, wide, 0.0, put)

    def state(self, group: Group, tensors: Mapping[int, Tensor], state: SeenState) -> Goal:
        """An optimizer's state of a group."""
        held = Held.of(state.store)
        if state.coded:
            return Goal(group, tensors, state.spec.dtype, state.spec.initial, partial(self._put_coded, held, state))
        put = partial(self._put, held)
        return Goal(group, tensors, state.store.dtype, state.spec.initial, put, _host_run(held))

    def load(self, goals: Iterator[Goal]) -> None:
        """Reads ahead with several threads, and puts one chunk after the other."""
        coming: deque[tuple[Goal, int, torch.Tensor | None, Future[torch.Tensor]]] = deque()
        with ThreadPoolExecutor(THREADS, thread_name_prefix="unwall load") as threads:
            for goal in goals:
                segments, item = goal.group.owned_segments(), goal.dtype.itemsize
                for low in range(0, goal.group.own_numel, CHUNK_ELEMENTS):
                    high = min(low + CHUNK_ELEMENTS, goal.group.own_numel)
                    if len(coming) >= CHUNKS_AHEAD:
                        self._finish(*coming.popleft())
                    buffer = None
                    if goal.place is None:
                        buffer = self._spare.pop() if self._spare else _memory(CHUNK_BYTES)
                        values = buffer[: (high - low) * item].view(goal.dtype)
                    else:
                        values = goal.place[low:high]
                    coming.append((goal, low, buffer, threads.submit(self._read, goal, segments, low, values)))
            while coming:
                self._finish(*coming.popleft())

    def _finish(self, goal: Goal, low: int, buffer: torch.Tensor | None, read: "Future[torch.Tensor]") -> None:
        values = read.result()
        if buffer is not None:
            goal.put(low, values)
            self._spare.append(buffer)

    def _read(self, goal: Goal, segments: tuple[Segment, ...], low: int, values: torch.Tensor) -> torch.Tensor:
        high = low + values.numel()
        inside = [segment for segment in segments if segment.shard_start < high and segment.shard_start + segment.numel > low]
        if sum(segment.numel for segment in inside if segment.slot in goal.tensors) < high - low:
            values.fill_(goal.otherwise)
        wanted, narrow = [], []
        for segment in inside:
            tensor = goal.tensors.get(segment.slot)
            if tensor is None:
                continue
            first, last = max(segment.shard_start, low), min(segment.shard_start + segment.numel, high)
            param, at = goal.group.params[segment.slot], first - low
            for part in parts_of(param, segment.start + first - segment.shard_start, last - first):
                target = values[at : at + part.numel]
                at += part.numel
                if tensor.dtype != goal.dtype:
                    narrow.append((target, torch.empty(part.numel, dtype=tensor.dtype)))
                    target = narrow[-1][1]
                wanted.append(Wanted(tensor, part, target))
        self._files.read_all(wanted)
        for target, read in narrow:
            target.copy_(read)
        return values

    def _put_split(self, param: Held, rest: Held, start: int, values: torch.Tensor) -> None:
        halves = _host_run(param), _host_run(rest)
        if halves[0] is not None and halves[1] is not None:
            self._split(halves[0][start:], halves[1][start:], values)
            return
        if self._halves is None:
            self._halves = (
                _memory(CHUNK_ELEMENTS * 2).view(param.dtype),
                _memory(CHUNK_ELEMENTS * 2).view(rest.dtype),
            )
        half, remainder = (part[: values.numel()] for part in self._halves)
        self._split(half, remainder, values)
        self._put(param, start, half)
        self._put(rest, start, remainder)

    def _split(self, half: torch.Tensor, remainder: torch.Tensor, values: torch.Tensor) -> None:
        split_into(half[: values.numel()], remainder[: values.numel()], values, self._tiers.host.pool)

    def _put_coded(self, held: Held, state: SeenState, start: int, values: torch.Tensor) -> None:
        """Changes what is kept of these elements. Chunks begin with a block, and the owned run ends with one."""
        if isinstance(held.block, MemoryBlock):
            state.encode(held.block.view(held.dtype)[start : start + values.numel()], values)
            return
        assert isinstance(held.block, DiskBlock)
        assert self._tiers.disk is not None
        nbytes = values.numel() * held.dtype.itemsize
        kept = _memory(align_up(nbytes))
        for ticket in self._tiers.disk.read(held.block, start * held.dtype.itemsize, kept.data_ptr(), nbytes, keep=kept):
            ticket.wait()
        codes = kept[:nbytes].view(held.dtype)
        state.encode(codes, values)
        self._put(held, start, codes)

    def _put(self, held: Held, start: int, values: torch.Tensor) -> None:
        start += held.start
        if isinstance(held.block, MemoryBlock):
            copy_flat(held.block.view(held.dtype)[start : start + values.numel()], values)
            return
        assert isinstance(held.block, DiskBlock)
        assert self._tiers.disk is not None
        item = held.dtype.itemsize
        if values.data_ptr() % 4096 or values.untyped_storage().nbytes() < align_up(values.nbytes):
            paged = _memory(align_up(values.nbytes))
            copy_flat(paged[: values.nbytes], values.view(torch.uint8))
            values = paged[: values.nbytes].view(held.dtype)
        tickets = self._tiers.disk.write(held.block, start * item, values.data_ptr(), values.nbytes, keep=values)
        try:
            for ticket in tickets:
                ticket.wait()
        except DiskError as error:
            raise named(error, f"writing the {held.block.label}") from error


def _host_run(held: Held) -> torch.Tensor | None:
    """The elements themselves, where they are in host memory."""
    run = held.block.view(held.dtype)[held.start :] if isinstance(held.block, MemoryBlock) else None
    return run if run is not None and run.device.type == "cpu" else None


def _memory(nbytes: int) -> torch.Tensor:
    return torch.frombuffer(HostMemory(nbytes).buffer(), dtype=torch.uint8)
