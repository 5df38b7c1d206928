"""Collectives over the ranks that share a model, and the agreement on which one is next.

[Note: agreement]
Ranks must call collectives in one order, but control flow may differ between them (experts, early exit, a module that only
one rank uses). So before each collective every rank announces what it wants next: gather this group, reduce that one, or
"I am through". When all want the same, it runs. Otherwise the ranks serve one wish after the other, lowest rank first:
everybody takes part in the collective of the served wish, whether it wanted it or not, and announces again. A rank that is
through serves until all are. So no order of uses is an error, and none can hang or mix up two groups' bytes.
The announcements are a few words over a CPU group; a rank alone needs none of it.
"""

import atexit
import datetime
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from unwall.tiers.meter import LinkMeter

_TIMEOUT = datetime.timedelta(minutes=10)


class DivergedError(RuntimeError):
    """The other ranks did not come to a collective that this one needs."""


@dataclass(frozen=True)
class Wish:
    """What a rank wants next."""

    kind: int
    """GATHER, REDUCE, THROUGH, or TOGETHER: something all ranks must call at once (a step, ``state_dict``)."""
    group: int
    used: tuple[int, ...] = ()
    """REDUCE: which of the group's parameters have a gradient on this rank, as bits of 62-bit words."""

    GATHER = 1
    REDUCE = 2
    THROUGH = 3
    TOGETHER = 4


def pack_bits(indices: Sequence[int], count: int) -> tuple[int, ...]:
    """Indices below ``count`` as bits of 62-bit words."""
    words = [0] * (-(-count // 62))
    for index in indices:
        words[index // 62] |= 1 << (index % 62)
    return tuple(words)


def unpack_bits(words: Sequence[int]) -> set[int]:
    return {62 * at + bit for at, word in enumerate(words) for bit in range(62) if word >> bit & 1}


class Ranks:
    """The ranks that a model is cut over: none beyond this one, or a process group.

    Every data collective returns the work in flight; its ``wait`` orders the device (NCCL) or blocks (gloo).
    """

    def __init__(self, group: "dist.ProcessGroup | None" = None, device: str = "cpu") -> None:
        self._group = group
        self.size = 1 if group is None else dist.get_world_size(group)
        self.rank = 0 if group is None else dist.get_rank(group)
        self._control: dist.ProcessGroup | None = None
        self._words = 0
        self._model = 0
        self._on_host = True
        self.meter: LinkMeter | None = None
        """Counts collectives, where someone wants to know. On an accelerator the time is that of the caller's wait."""
        if group is not None and self.size > 1:
            self._on_host = "gloo" in str(group._get_backend(torch.device(device)).name()).lower()
            self._control = _control_group(group)

    def begin_announcing(self, words: int) -> None:
        """A model is ready: its announcements carry ``words`` words of used-bits (the largest group decides) and its number,
        counted alike on every rank."""
        global _models
        _models += 1
        self._words, self._model = words, _models

    def announce(self, wish: Wish, phase: int, where: str) -> list[Wish]:
        """Every rank's wish. DivergedError, naming ``where``, when the others do not answer or are somewhere else.

        ``phase`` counts forwards and backwards: control flow may differ inside one, but all ranks must be in the same one.
        """
        rows = self._exchange([self._model, wish.kind, wish.group, phase], where)  # of fixed length, whatever the model
        others = [rank for rank, row in enumerate(rows) if row[0] != self._model]
        if others:
            raise DivergedError(f"rank {self.rank} is at {where}, but rank {others[0]} is running another sharded model")
        wishes = [Wish(kind, index) for _, kind, index, _ in rows]
        behind = [rank for rank, row in enumerate(rows) if row[3] != phase]
        apart = [rank for rank, other in enumerate(wishes) if (other.kind == Wish.TOGETHER) != (wish.kind == Wish.TOGETHER)]
        if behind or apart:
            raise DivergedError(
                f"rank {self.rank} is at {where}, but rank {(behind or apart)[0]} is elsewhere: all ranks must run the same "
                "forwards, backwards and steps, and call state_dict, full_params and the like together"
            )
        if any(other.kind == Wish.REDUCE for other in wishes):
            used = self._exchange(list(wish.used) + [0] * (self._words - len(wish.used)), where)
            wishes = [Wish(other.kind, other.group, tuple(bits)) for other, bits in zip(wishes, used, strict=True)]
        return wishes

    def _exchange(self, words: list[int], where: str) -> list[list[int]]:
        every = torch.empty(self.size * len(words), dtype=torch.int64)
        try:
            _all_gather(every, torch.tensor(words, dtype=torch.int64), group=self._control)
        except RuntimeError as error:
            raise DivergedError(
                f"rank {self.rank} is at {where} and another rank did not answer (within {_TIMEOUT}): did it fail, and do all "
                "ranks run the same number of iterations, of training and of evaluation?"
            ) from error
        return every.view(self.size, -1).tolist()

    def all_gather_on_host(self, whole: torch.Tensor, shard: torch.Tensor) -> None:
        """The same for host memory, whatever the ranks use for the device."""
        _all_gather(whole, shard, group=self._control)

    def all_gather(self, whole: torch.Tensor, shard: torch.Tensor) -> "Work":
        """Fills ``whole`` with every rank's shard. ``shard`` may be this rank's part of ``whole``."""
        work = _all_gather(whole, shard, group=self._group, async_op=True)
        return Work(work, keep=(whole, shard), meter=self.meter, label="all-gather")

    def reduce_scatter(self, shard: torch.Tensor, whole: torch.Tensor) -> "Work":
        """``shard`` becomes the sum over ranks of their ``whole``'s part for this rank."""
        if not self._on_host:
            scattered = _reduce_scatter(shard, whole, group=self._group, async_op=True)
            return Work(scattered, keep=(whole, shard), meter=self.meter, label="reduce-scatter")
        # gloo's own reduce-scatter moves N times the bytes. Exchange the parts and add them here, always in rank order.
        parts = torch.empty_like(whole)
        work = dist.all_to_all_single(parts, whole, group=self._group, async_op=True)

        def add() -> None:
            rows = parts.view(self.size, -1)
            shard.copy_(rows[0])
            for row in rows[1:]:
                shard.add_(row)

        return Work(work, keep=(whole, parts), then=add, meter=self.meter, label="reduce-scatter")

    def all_reduce_sum(self, values: torch.Tensor) -> torch.Tensor:
        """The sum of a small tensor over the ranks, added in rank order: the same bits on each."""
        if self.size == 1:
            return values
        every = values.new_empty(self.size * values.numel())
        _all_gather(every, values.reshape(-1), group=self._group)
        return every.view(self.size, *values.shape).sum(0)

    def union(self, names: set[str]) -> set[str]:
        """Every rank's names together."""
        if self.size == 1:
            return names
        every: list[set[str]] = [set()] * self.size
        dist.all_gather_object(every, names, group=self._control)
        return set().union(*every)

    def every(self, thing: Any) -> list[Any]:
        """Every rank's object, by rank."""
        if self.size == 1:
            return [thing]
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, thing, group=self._control)
        return found

    def broadcast_object(self, thing: Any) -> Any:
        """Rank 0's object on every rank."""
        if self.size == 1:
            return thing
        box = [thing]
        dist.broadcast_object_list(box, group=self._control, group_src=0)
        return box[0]

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Rank 0's values on every rank."""
        if self.size > 1:
            dist.broadcast(tensor, group=self._group, group_src=0)


_models = 0
_controls: dict["dist.ProcessGroup", "dist.ProcessGroup"] = {}
atexit.register(_controls.clear)  # a group that lives into the interpreter's end aborts the process


def _control_group(group: "dist.ProcessGroup") -> "dist.ProcessGroup":
    """The CPU group for announcements beside ``group``: one for all models, because each costs threads and sockets."""
    if group not in _controls:
        members = dist.get_process_group_ranks(group)
        # Only the members take part: the other ranks may shard another model, or none.
        _controls[group] = dist.new_group(members, timeout=_TIMEOUT, backend="gloo", use_local_synchronization=True)
    return _controls[group]


class Work:
    """A collective in flight. It owns the buffers until ``wait``."""

    def __init__(
        self,
        work: Any,
        keep: tuple[torch.Tensor, ...] = (),
        then: Any = None,
        *,
        meter: LinkMeter | None = None,
        label: str = "",
    ) -> None:
        self._work = work
        self._keep = keep
        self._then = then
        self._meter = meter
        self._label = label
        self._start = time.monotonic()

    def done(self) -> bool:
        return self._work is None or bool(self._work.is_completed())

    def wait(self) -> None:
        if self._work is None:
            return
        self._work.wait()
        self._work = None
        if self._then is not None:
            self._then()
            self._then = None
        if self._meter is not None:
            self._meter.add(sum(tensor.nbytes for tensor in self._keep[:1]))
            self._meter.busy(self._label, self._start, time.monotonic())
        self._keep = ()


def _all_gather(whole: torch.Tensor, shard: torch.Tensor, **options: Any) -> Any:
    call = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # renamed in torch 2.13
    return call(whole, shard, **options)


def _reduce_scatter(shard: torch.Tensor, whole: torch.Tensor, **options: Any) -> Any:
    call = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    return call(shard, whole, **options)
