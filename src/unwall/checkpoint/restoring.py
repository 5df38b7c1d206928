"""From a checkpoint's files into the states of groups, wherever they live, chunk by chunk of this rank's elements."""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

import torch

from unwall.checkpoint.copying import copy_flat
from unwall.checkpoint.goals import Goal
from unwall.checkpoint.lots import CHUNK_ELEMENTS, Held
from unwall.checkpoint.manifest import Tensor
from unwall.checkpoint.reader import THREADS, CheckpointFiles, Wanted
from unwall.checkpoint.spread import parts_of
from unwall.checkpoint.waiting import Home
from unwall.native.library import DiskError
from unwall.native.memory import HostMemory
from unwall.optim.seen_states import SeenState
from unwall.shards.group import Group
from unwall.shards.layout import Segment
from unwall.shards.master import rounded, split_into
from unwall.shards.states import MASTER, REMAINDER
from unwall.tiers.block import DiskBlock, MemoryBlock
from unwall.tiers.disk import named
from unwall.tiers.sizes import align_up
from unwall.tiers.tiers import Tiers

CHUNKS_AHEAD = 4
CHUNK_BYTES = CHUNK_ELEMENTS * 8


class Restorer:
    """Loads goals through a few buffers."""

    def __init__(self, tiers: Tiers, files: CheckpointFiles) -> None:
        self._tiers = tiers
        self._files = files
        self._spare: list[torch.Tensor] = []
        self._halves: tuple[torch.Tensor, torch.Tensor] | None = None

    def master(self, group: Group, tensors: Mapping[int, Tensor], places: Sequence[Held]) -> Goal:
        """The parameters of a group, and what its master has beside them. ``places``: for each of ``master_homes``."""
        param = places[0]
        if group.has_state(REMAINDER):
            rest = places[1]
            put_split = partial(self._put_split, param, rest)
            runs = _host_run(param, group.own_numel), _host_run(rest, group.own_numel)
            halves = (runs[0], runs[1]) if runs[0] is not None and runs[1] is not None else None
            halves = halves if rest.dtype is torch.int16 else None
            return Goal(group, tensors, torch.float32, 0.0, put_split, halves=halves)
        if group.has_state(MASTER):

            def put_both(start: int, values: torch.Tensor) -> None:
                self._put(places[1], start, values)
                self._put(param, start, values.to(param.dtype))

            return Goal(group, tensors, torch.float32, 0.0, put_both)
        wide = torch.promote_types(param.dtype, torch.float32) if _is_trained_dtype(param.dtype) else param.dtype

        def put(start: int, values: torch.Tensor) -> None:
            self._put(param, start, rounded(values, param.dtype))

        return Goal(group, tensors, wide, 0.0, put, _run(param, group.own_numel) if wide is param.dtype else None)

    def state(self, group: Group, tensors: Mapping[int, Tensor], state: SeenState, place: Held | None = None) -> Goal:
        """An optimizer's state of a group. ``place``: where it goes to, if not to its home."""
        held = Held.of(state.store) if place is None else place
        if state.coded:
            return Goal(group, tensors, state.spec.dtype, state.spec.initial, partial(self._put_coded, held, state))
        put = partial(self._put, held)
        return Goal(group, tensors, state.store.dtype, state.spec.initial, put, _run(held, group.own_numel))

    def load(self, goals: Iterable[Goal]) -> None:
        """What was verified before. Reads ahead with several threads, and puts one chunk after the other."""
        coming: deque[tuple[Goal, int, torch.Tensor | None, Future[torch.Tensor]]] = deque()
        with ThreadPoolExecutor(THREADS, thread_name_prefix="unwall load") as threads:
            for goal in goals:
                segments, item = goal.group.owned_segments(), goal.dtype.itemsize
                for low in range(0, goal.group.own_numel, CHUNK_ELEMENTS):
                    high = min(low + CHUNK_ELEMENTS, goal.group.own_numel)
                    if len(coming) >= CHUNKS_AHEAD:
                        self._finish(*coming.popleft())
                    buffer = None
                    if goal.place is None or goal.place.device.type != "cpu":
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
        end = start + values.numel()
        halves = _host_run(param, end), _host_run(rest, end)
        if halves[0] is not None and halves[1] is not None:
            self._split(halves[0][start:], halves[1][start:], values)
            return
        if self._halves is None:
            self._halves = _memory(CHUNK_ELEMENTS * 2), _memory(CHUNK_ELEMENTS * 2)
        dtypes = param.dtype, rest.dtype  # of lean groups, and of frozen ones beside them, which are exact
        half, remainder = (part.view(dtype)[: values.numel()] for part, dtype in zip(self._halves, dtypes, strict=True))
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


def master_homes(group: Group) -> list[Home]:
    """Where the parameters of a group live, and what its master has beside them."""
    flat = Held(group.buffer.block, group.layout.dtype, group.own_start)
    found = [Home(flat, group.own_numel, None) if group.param is None else Home.of(group.param)]
    return found + [Home.of(group.store(spec)) for spec in (REMAINDER, MASTER) if group.has_state(spec)][:1]


def lacks_master(group: Group, tensors: Mapping[int, Tensor]) -> bool:
    """The checkpoint has more bits of the parameters than the group has room for yet: ``make_master`` comes first."""
    exact = any(tensor.dtype is torch.float32 for tensor in tensors.values())
    return exact and group.layout.dtype is torch.bfloat16 and not group.has_state(REMAINDER)


def _is_trained_dtype(dtype: torch.dtype) -> bool:
    """Floats that optimizers update. Those of a byte are codes, which nobody rounds to."""
    return dtype.is_floating_point and dtype.itemsize > 1


def _run(held: Held, numel: int) -> torch.Tensor | None:
    """The elements themselves, where they are in memory."""
    return held.block.view(held.dtype)[held.start : held.start + numel] if isinstance(held.block, MemoryBlock) else None


def _host_run(held: Held, numel: int) -> torch.Tensor | None:
    run = _run(held, numel)
    return run if run is not None and run.device.type == "cpu" else None


def _memory(nbytes: int) -> torch.Tensor:
    return torch.frombuffer(HostMemory(nbytes).buffer(), dtype=torch.uint8)
