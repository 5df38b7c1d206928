"""Collectives over the ranks that share a model. Which one is next: see [Note: agreement] in schedule/agreement.py.

[Note: behind a copy]
A gather of parameters from the host reads what is being copied to the device. On an accelerator it is begun on a stream of its
own, which waits for the copy: what this thread queues to compute meanwhile, before it uses the group, does not wait for either.
That stream also comes after all that was queued before, so what is packed or gathered may be written where compute has read;
and whoever waits for the gather comes after that stream, so memory that was used on it may serve compute again.
"""

import atexit
import contextlib
import datetime
import os
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from unwall.shards import default_hooks
from unwall.shards.control import Control, all_gather_flat
from unwall.shards.nodes import Nodes, forget_groups, groups_of
from unwall.shards.watch import Watch
from unwall.tiers.meter import LinkMeter
from unwall.tiers.ticket import Ticket, order_after


@dataclass
class Traffic:
    """What came from other ranks since the statistics were reset, in bytes, in the form it travels in."""

    gathered_bytes: int = 0
    """Parameters of groups."""
    reduced_bytes: int = 0
    """Gradients of groups."""
    gathered_far_bytes: int = 0
    """Of the parameters, what came from other nodes, where the plan knows of nodes."""
    reduced_far_bytes: int = 0
    """The same of the gradients."""

    def reset(self) -> None:
        self.gathered_bytes = self.reduced_bytes = self.gathered_far_bytes = self.reduced_far_bytes = 0


class Ranks:
    """The ranks that a model is cut over: none beyond this one, or a process group.

    Every data collective returns the work in flight; its ``wait`` orders the device (NCCL) or blocks (gloo).
    """

    def __init__(self, group: "dist.ProcessGroup | None" = None, device: str = "cpu", part_of: "Ranks | None" = None) -> None:
        """``part_of``: the ranks that these are some of. What they do together counts as theirs."""
        self._group = group
        self._part_of = part_of
        self._backend: Any = None
        self.size = 1 if group is None else dist.get_world_size(group)
        self.rank = 0 if group is None else dist.get_rank(group)
        self._on_host = True
        self.device = torch.device(device, torch.cuda.current_device()) if device == "cuda" else torch.device(device)
        """Where the tensors lie that these ranks exchange."""
        self.meter: LinkMeter | None = None
        """Counts collectives, where someone wants to know. On an accelerator the time is that of the caller's wait."""
        if group is not None and self.size > 1:
            self._backend = group._get_backend(torch.device(device))
            self._on_host = "gloo" in str(self._backend.name()).lower()
        self.control: Control = _control(group, self._backend, self.rank, self.size) if part_of is None else part_of.control
        self.started = 0
        """Collectives of data that were begun."""
        self.traffic = Traffic()
        self.steps = 0
        """Steps of the optimizer since training began. What is random in sums (stochastic rounding) depends on it."""
        self.nodes: Nodes | None = None
        """Where the ranks are, if that matters. See [Note: nodes] in shards/nodes.py."""
        self._side: torch.cuda.Stream | None = None
        if not self._on_host:
            self.control.watch.stuck.add(self)
        _live.add(self)

    def let_go(self) -> None:
        """Keeps the process groups no longer. Where the ranks could not go on, works in flight would hold up the end."""
        for part in () if self.nodes is None else (self.nodes.inside, self.nodes.across):
            part.let_go()  # while the control group still says whether they could
        if self.size > 1 and self._group is not None and self.control.watch.end:
            with contextlib.suppress(RuntimeError):
                self._backend.abort()
        self._group = self._backend = None
        if self._part_of is None:
            self.control.let_go()

    @property
    def group(self) -> "dist.ProcessGroup":
        assert self._group is not None
        return self._group

    def know_nodes(self, per_node: int, made: "tuple[dist.ProcessGroup, dist.ProcessGroup] | None" = None) -> None:
        """From now on these ranks are on nodes with ``per_node`` of them each. All ranks call it together. ``made``: process
        groups inside a node and across nodes, where there are some already."""
        if 1 < per_node < self.size:
            inside, across = groups_of(self, per_node) if made is None else made
            self.nodes = Nodes(Ranks(inside, self.device.type, self), Ranks(across, self.device.type, self))

    def give_up(self) -> None:
        """The ranks cannot go on: a collective that the device waits in would never end, nor would whoever waits for that."""
        backend = self._backend
        with contextlib.suppress(RuntimeError):
            if backend is not None:
                backend.abort()

    def begin_announcing(self, words: int) -> None:
        """A model is ready: its ranks say which parameters have a gradient in ``words`` words (the largest group decides)."""
        self.control.begin(words)

    def all_gather_on_host(self, whole: torch.Tensor, shard: torch.Tensor) -> None:
        """The same for host memory, whatever the ranks use for the device."""
        self.control.share(whole, shard, "the parameters of a model under construction")

    def from_others(self, nbytes: int) -> int:
        """What of ``nbytes`` that all ranks have in equal parts comes to this one."""
        return nbytes // self.size * (self.size - 1)

    def from_far(self, nbytes: int) -> int:
        """What of it comes from other nodes."""
        return 0 if self.nodes is None else nbytes // self.size * (self.size - self.nodes.per_node)

    def all_gather(self, whole: torch.Tensor, shard: torch.Tensor, then: Callable[[], None] | None = None) -> "Collective":
        """Fills ``whole`` with every rank's shard. ``shard`` may be this rank's part of ``whole``. ``then`` is called when it
        is there; so below."""
        work = self._start("all-gather", all_gather_flat, _as_bytes(whole), _as_bytes(shard))
        return self._begun(work, (whole, shard), "all-gather", then)

    @contextlib.contextmanager
    def behind(self, work: Ticket) -> Iterator[None]:
        """Collectives that are begun inside come after ``work``, a copy to the device. See [Note: behind a copy]."""
        if self._on_host:
            order_after(work, self.device)
            yield
            return
        if self._side is None:
            self._side = torch.cuda.Stream(self.device)
        side, outer = self._side, torch.cuda.current_stream(self.device)
        side.wait_stream(outer)
        try:
            with torch.cuda.stream(side):
                order_after(work, self.device)
                yield
        except BaseException:
            outer.wait_stream(side)  # nobody waits for a gather that was not begun
            raise

    def exchange(self, received: torch.Tensor, sent: torch.Tensor, then: Callable[[], None] | None = None) -> "Collective":
        """``received`` becomes the parts for this rank of every rank's ``sent``, in the order of the ranks."""
        work = self._start("exchange", dist.all_to_all_single, received, sent)
        return self._begun(work, (received, sent), "exchange", then)

    def reduce_scatter(self, shard: torch.Tensor, whole: torch.Tensor) -> "Collective":
        """``shard`` becomes the sum over ranks of their ``whole``'s part for this rank."""
        if not self._on_host:
            scattered = self._start("reduce-scatter", _reduce_scatter, shard, whole)
            return self._begun(scattered, (whole, shard), "reduce-scatter")
        # gloo's own reduce-scatter moves N times the bytes. Exchange the parts and add them here, always in rank order.
        parts = torch.empty_like(whole)
        work = self._start("reduce-scatter", dist.all_to_all_single, parts, whole)

        def add() -> None:
            rows = parts.view(self.size, -1)
            shard.copy_(rows[0])
            for row in rows[1:]:
                shard.add_(row)

        return self._begun(work, (whole, parts), "reduce-scatter", add)

    def _start(self, label: str, call: Callable[..., Any], *tensors: torch.Tensor, **options: Any) -> Any:
        """torch's collective, in flight. A backend may notice here already that another rank has ended."""
        try:
            with default_hooks.hidden():
                return call(*tensors, group=self._group, async_op=True, **options)
        except dist.DistError as error:
            raise self.control.unanswered(label, str(error)) from error

    def _begun(self, work: Any, keep: tuple[torch.Tensor, ...], label: str, then: Any = None) -> "Collective":
        owner = self if self._part_of is None else self._part_of
        owner.started += 1
        return Collective(work, keep, then, meter=owner.meter, label=label, control=self.control, blocks=self._on_host)

    def all_reduce_sum(self, values: torch.Tensor) -> torch.Tensor:
        """The sum of a small tensor over the ranks, added in rank order: the same bits on each."""
        if self.size == 1:
            return values
        every = values.new_empty(self.size * values.numel())
        label = "the norm of the gradients"
        self._begun(self._start(label, all_gather_flat, every, values.reshape(-1)), (), label).wait()
        return every.view(self.size, *values.shape).sum(0)

    def merge(self, whole: torch.Tensor) -> None:
        """Each rank has filled elements of its own and left the others zero: now every rank has all of them, bit by bit."""
        if self.size > 1:
            work = self._start("values of a gradient", dist.all_reduce, whole.view(-1).view(torch.uint8))
            self._begun(work, (whole,), "values of a gradient").wait()

    def every(self, thing: Any) -> list[Any]:
        """Every rank's object, by rank."""
        if self.size == 1:
            return [thing]
        return self.control.every(thing, "unwall.shard")

    def broadcast_object(self, thing: Any) -> Any:
        """Rank 0's object on every rank."""
        if self.size == 1:
            return thing
        return self.control.from_rank_0(thing, "rank 0's part")

    def broadcast(self, tensor: torch.Tensor, rank: int = 0) -> None:
        """One rank's values on every rank."""
        if self.size > 1:
            work = self._start("broadcast", dist.broadcast, _as_bytes(tensor), group_src=rank)
            self._begun(work, (tensor,), "broadcast").wait()


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Floating-point numbers of one byte (frozen fp8) as bytes: few backends know them, and nothing is added up here."""
    return tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 and tensor.is_floating_point() else tensor


_live: "weakref.WeakSet[Ranks]" = weakref.WeakSet()
_controls: dict["dist.ProcessGroup", tuple[Any, Watch]] = {}
_owner = os.getpid()
"""The process that made the last of them."""


@atexit.register
def _let_go_of_groups() -> None:
    """Nothing here keeps a process group into the interpreter's end: its threads would want an interpreter that is gone, and
    abort the process. Models that are still alive, or garbage that was not collected, do not count any more. A forked child has
    none of those threads, and must not end them."""
    if os.getpid() != _owner:
        return
    for ranks in list(_live):
        ranks.let_go()
    _controls.clear()
    forget_groups()


def _control(group: "dist.ProcessGroup | None", backend: Any, rank: int, size: int) -> Control:
    """The control group beside ``group``: one for all models, because each costs threads and sockets."""
    if group is None or size == 1:
        return Control(None, None, rank, size, datetime.timedelta())
    timeout = getattr(getattr(backend, "options", None), "_timeout", datetime.timedelta(minutes=30))
    if group not in _controls:
        global _owner
        _owner = os.getpid()
        watch = Watch(PrefixStore("unwall/watch", _store_of(group).clone()), rank, size)
        _controls[group] = host_group(group, "control", timeout), watch
    return Control(*_controls[group], rank, size, timeout)


def host_group(group: "dist.ProcessGroup", name: str, timeout: datetime.timedelta) -> Any:
    """A gloo group of our own beside ``group``, for ``Control``. Its members call this together.

    Not torch's new_group. Ranks outside of the group, which may shard another model or none, have no part in it, and torch
    would name their next groups otherwise than those of the members: these would wait for each other."""
    store = PrefixStore(f"unwall/{name}", _store_of(group))
    return dist.ProcessGroupGloo(store, dist.get_rank(group), dist.get_world_size(group), timeout)


def _store_of(group: "dist.ProcessGroup") -> Any:
    return dist.distributed_c10d._world.pg_map[group][1]


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
        control: Control | None = None,
        blocks: bool = False,
    ) -> None:
        self._work = work
        self._keep = keep
        self._then = then
        self._meter = meter
        self._label = label
        self._control = control
        self._blocks = blocks
        self._start = time.monotonic()

    def done(self) -> bool:
        return self._work is None or bool(self._work.is_completed())

    def arrive(self) -> None:
        """``wait`` for whoever reads it on the host next: it is there, or a DivergedError says that it will not be."""
        if self._work is not None and self._control is not None and not self._blocks:
            self._control.outwait(self._work, self._label)
        self.wait()

    def wait(self) -> None:
        if self._work is None:
            return
        if self._control is None:
            self._work.wait()
        else:
            self._control.wait(self._work, self._label, blocks=self._blocks)
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
