"""Collectives over the ranks that share a model. Which one is next: see [Note: agreement] in schedule/agreement.py."""

import atexit
import time
import weakref
from typing import Any

import torch
import torch.distributed as dist

from unwall.shards import default_hooks
from unwall.shards.control import TIMEOUT, Control, DivergedError, all_gather_flat
from unwall.tiers.meter import LinkMeter


class Ranks:
    """The ranks that a model is cut over: none beyond this one, or a process group.

    Every data collective returns the work in flight; its ``wait`` orders the device (NCCL) or blocks (gloo).
    """

    def __init__(self, group: "dist.ProcessGroup | None" = None, device: str = "cpu") -> None:
        self._group = group
        self.size = 1 if group is None else dist.get_world_size(group)
        self.rank = 0 if group is None else dist.get_rank(group)
        self._on_host = True
        self.meter: LinkMeter | None = None
        """Counts collectives, where someone wants to know. On an accelerator the time is that of the caller's wait."""
        if group is not None and self.size > 1:
            self._on_host = "gloo" in str(group._get_backend(torch.device(device)).name()).lower()
        self.control = Control(_control_group(group) if group is not None and self.size > 1 else None, self.rank, self.size)
        _live.add(self)

    def let_go(self) -> None:
        """Keeps the process groups no longer."""
        self._group = None
        self.control.let_go()

    def begin_announcing(self, words: int) -> None:
        """A model is ready: its ranks say which parameters have a gradient in ``words`` words (the largest group decides)."""
        self.control.begin(words)

    def all_gather_on_host(self, whole: torch.Tensor, shard: torch.Tensor) -> None:
        """The same for host memory, whatever the ranks use for the device."""
        all_gather_flat(whole, shard, group=self.control.group)

    def all_gather(self, whole: torch.Tensor, shard: torch.Tensor) -> "Collective":
        """Fills ``whole`` with every rank's shard. ``shard`` may be this rank's part of ``whole``."""
        with default_hooks.hidden():
            work = all_gather_flat(whole, shard, group=self._group, async_op=True)
        return Collective(work, keep=(whole, shard), meter=self.meter, label="all-gather")

    def reduce_scatter(self, shard: torch.Tensor, whole: torch.Tensor) -> "Collective":
        """``shard`` becomes the sum over ranks of their ``whole``'s part for this rank."""
        if not self._on_host:
            with default_hooks.hidden():
                scattered = _reduce_scatter(shard, whole, group=self._group, async_op=True)
            return Collective(scattered, keep=(whole, shard), meter=self.meter, label="reduce-scatter")
        # gloo's own reduce-scatter moves N times the bytes. Exchange the parts and add them here, always in rank order.
        parts = torch.empty_like(whole)
        with default_hooks.hidden():
            work = dist.all_to_all_single(parts, whole, group=self._group, async_op=True)

        def add() -> None:
            rows = parts.view(self.size, -1)
            shard.copy_(rows[0])
            for row in rows[1:]:
                shard.add_(row)

        return Collective(work, keep=(whole, parts), then=add, meter=self.meter, label="reduce-scatter")

    def all_reduce_sum(self, values: torch.Tensor) -> torch.Tensor:
        """The sum of a small tensor over the ranks, added in rank order: the same bits on each."""
        if self.size == 1:
            return values
        every = values.new_empty(self.size * values.numel())
        all_gather_flat(every, values.reshape(-1), group=self._group)
        return every.view(self.size, *values.shape).sum(0)

    def merge(self, whole: torch.Tensor) -> None:
        """Each rank has filled elements of its own and left the others zero: now every rank has all of them, bit by bit."""
        if self.size > 1:
            dist.all_reduce(whole.view(-1).view(torch.uint8), group=self._group)

    def every(self, thing: Any) -> list[Any]:
        """Every rank's object, by rank."""
        if self.size == 1:
            return [thing]
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, thing, group=self.control.group)
        return found

    def broadcast_object(self, thing: Any) -> Any:
        """Rank 0's object on every rank."""
        if self.size == 1:
            return thing
        box = [thing]
        dist.broadcast_object_list(box, group=self.control.group, group_src=0)
        return box[0]

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Rank 0's values on every rank."""
        if self.size > 1:
            dist.broadcast(tensor, group=self._group, group_src=0)


_live: "weakref.WeakSet[Ranks]" = weakref.WeakSet()
_controls: dict["dist.ProcessGroup", "dist.ProcessGroup"] = {}


@atexit.register
def _let_go_of_groups() -> None:
    """Nothing here keeps a process group into the interpreter's end: its threads would want an interpreter that is gone, and
    abort the process. Models that are still alive, or garbage that was not collected, do not count any more."""
    for ranks in list(_live):
        ranks.let_go()
    _controls.clear()


def _control_group(group: "dist.ProcessGroup") -> "dist.ProcessGroup":
    """The CPU group for announcements beside ``group``: one for all models, because each costs threads and sockets."""
    if group not in _controls:
        members = dist.get_process_group_ranks(group)
        # Only the members take part: the other ranks may shard another model, or none.
        _controls[group] = dist.new_group(members, timeout=TIMEOUT, backend="gloo", use_local_synchronization=True)
    return _controls[group]


class Collective:
    """One in flight. It owns the buffers until ``wait``."""

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
        try:
            self._work.wait()
        except RuntimeError as error:
            raise DivergedError(
                f"{self._label} failed because another rank did not take part ({error}): did it fail, and do all ranks run the "
                "same number of iterations, of training and of evaluation?"
            ) from error
        self._work = None
        if self._then is not None:
            self._then()
            self._then = None
        if self._meter is not None:
            self._meter.add(sum(tensor.nbytes for tensor in self._keep[:1]))
            self._meter.busy(self._label, self._start, time.monotonic())
        self._keep = ()


def _reduce_scatter(shard: torch.Tensor, whole: torch.Tensor, **options: Any) -> Any:
    call = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    return call(shard, whole, **options)
