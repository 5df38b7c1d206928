"""Places for a gradient that leaves the device: host and disk. See [Note: landed] in shards/landing.py.

Both are kept from one step to the next, because an update may read them after the gradient was forgotten. Of one that is used
during backward (``Plan(grads="transient")``) nothing stays: it passes through memory that the next ones use as well.
"""

import torch

from unwall.native.library import DiskError
from unwall.shards.collectives import Ranks
from unwall.shards.group import Group
from unwall.shards.landing import AGAIN_ADVICE, Holding, LandingPlace, OnDevice
from unwall.shards.layout import Segment
from unwall.shards.squares import SquareSum, counted_part
from unwall.shards.store import Store
from unwall.tiers.block import DiskBlock, MemoryBlock, Region
from unwall.tiers.disk import named
from unwall.tiers.host import HostBlock
from unwall.tiers.ledger import BudgetError
from unwall.tiers.loans import Loans
from unwall.tiers.ticket import Joined
from unwall.tiers.tiers import Tiers


class Away(LandingPlace):
    """What host and disk share: leaving the device may fail. ``rank``: says which part of the gradient is counted here."""

    def __init__(self, group: Group, tiers: Tiers, dtype: torch.dtype, rank: int) -> None:
        super().__init__(group, tiers, dtype)
        self._rank = rank
        self._lost: Exception | None = None

    def begin(self, incoming: MemoryBlock, beside: list[Segment] | None = None) -> None:
        if self.holding is not Holding.LOST:
            self._begin(incoming, beside)

    def finish(self, incoming: MemoryBlock, flat: MemoryBlock | None) -> None:
        if flat is not None:
            self._tiers.device.free(flat)
        try:
            if self.holding is not Holding.LOST:
                self._finish(incoming)
        except Exception as error:
            self.holding, self.landing, self._lost = Holding.LOST, None, error
            if isinstance(error, DiskError):
                self.check()
            raise
        finally:
            self._tiers.device.free(incoming)

    def _begin(self, incoming: MemoryBlock, beside: list[Segment] | None) -> None:
        raise NotImplementedError

    def _finish(self, incoming: MemoryBlock) -> None:
        raise NotImplementedError

    def check(self) -> None:
        if self._lost is None:
            return
        advice = "call zero_grad() and run the forward and backward of this step again"
        if isinstance(self._lost, DiskError):
            error: Exception = named(self._lost, f"keeping the gradient of group {self._group.name}")
            error.add_note(advice)
        else:
            error = RuntimeError(f"the gradient of group {self._group.name} could not be kept ({self._lost}): {advice}")
        raise error from self._lost

    def clear(self) -> None:
        super().clear()
        self._lost = None

    def _measure(self, own: torch.Tensor) -> torch.Tensor:
        return SquareSum(counted_part(own, self._group, self._rank), lambda: self._group.pool).tensor()


class OnHost(Away):
    """Lands in page-locked memory. A further pass lands there, too, after what was there has moved into an fp32 sum."""

    def __init__(self, group: Group, tiers: Tiers, dtype: torch.dtype, rank: int) -> None:
        super().__init__(group, tiers, dtype, rank)
        self._arrivals: Store | None = None
        self._sum: Store | None = None

    def _begin(self, incoming: MemoryBlock, beside: list[Segment] | None) -> None:
        first = self.holding is Holding.NOTHING
        if not first and beside is not None and self._sum is None:
            self._put_beside(incoming, beside)
            return
        if not first:
            self._move_to_sum()
        own = incoming.view(self._dtype)
        self.square_sum = self._measure(own) if first and own.is_cuda else None
        if self._arrivals is None:
            self._arrivals = self._store(self._dtype, pinned=True)
        self.landing = self._tiers.links.copy(incoming, self._arrivals.block, self._group.name)
        self.holding = Holding.LANDING

    def _put_beside(self, incoming: MemoryBlock, beside: list[Segment]) -> None:
        """A further piece of the pass that has landed."""
        assert self._arrivals is not None
        self.await_landing()
        item, target, tickets = self._dtype.itemsize, self._arrivals.block, []
        for segment in beside:
            source = Region(incoming, segment.shard_start * item, segment.numel * item)
            tickets.append(self._tiers.links.copy(source, Region(target, source.offset, source.nbytes), self._group.name))
        self.square_sum, self.landing, self.holding = None, Joined(tickets), Holding.LANDING

    def _finish(self, incoming: MemoryBlock) -> None:  # noqa: ARG002 (the copy holds on to its memory)
        if self._sum is not None:
            assert self._arrivals is not None
            self.await_landing()
            self._sum.tensor().add_(self._arrivals.tensor(write=False))

    def _source(self) -> torch.Tensor:
        return self._held().tensor(write=False)

    def rest(self, write: bool = False) -> torch.Tensor:
        value = super().rest(write)
        if write:
            self._held().tensor()  # nothing that was updated ahead of its step needs it as it is
        return value

    def _held(self) -> Store:
        held = self._sum or self._arrivals
        assert held is not None
        return held

    @property
    def sum_bytes(self) -> int:
        needed = self._sum is None and self.holding in (Holding.LANDING, Holding.LANDED)
        return self._group.own_numel * self._wide.itemsize if needed else 0

    def clear(self) -> None:
        super().clear()
        if self._sum is not None:
            self._sum.free()  # an update that still reads it has the tensor, and with it the memory
            self._sum = None

    def _move_to_sum(self) -> None:
        self.await_landing()
        if self._sum is None:
            assert self._arrivals is not None
            try:
                total = self._store(self._wide)
            except BudgetError as error:
                raise error.advising(AGAIN_ADVICE) from None
            total.tensor().copy_(self._arrivals.tensor(write=False))
            self._sum = total

    def _store(self, dtype: torch.dtype, pinned: bool = False) -> Store:
        label, numel = f"gradient shard of {self._group.name}", self._group.own_numel
        return Store(self._tiers, self._group.pending, "host", numel, dtype, label, pinned=pinned, gradient=True)


class PassingThrough(Away):
    """Lands in host memory that is lent until its update has read it. Not for sums of several passes."""

    def __init__(self, group: Group, tiers: Tiers, dtype: torch.dtype, rank: int, loans: Loans) -> None:
        super().__init__(group, tiers, dtype, rank)
        self._loans = loans
        self._block: HostBlock | None = None

    def _begin(self, incoming: MemoryBlock, beside: list[Segment] | None) -> None:
        if self.holding is Holding.NOTHING or (beside is not None and self._block is None):
            self._begin_first(incoming)
        elif beside is not None and self._block is not None:
            self._put_beside(incoming, beside, self._block)
        else:
            raise RuntimeError(
                f"a second backward before step() for group {self._group.name}, or it has parameters that no optimizer steps, "
                "but Plan(grads='transient') keeps no gradients that could add up: call step() after each backward, freeze "
                "what is not trained (requires_grad_(False)), or use Plan(grads='auto')"
            )

    def _begin_first(self, incoming: MemoryBlock) -> None:
        own = incoming.view(self._dtype)
        self.square_sum = self._measure(own) if own.is_cuda and not self.gone else None
        if self._block is None:
            try:
                self._block = self._loans.take(incoming.nbytes, f"gradient of {self._group.name}")
            except BudgetError as error:
                error.add_note(
                    "Plan(grads='transient') has room for a few gradients at a time: AdamW(model.parameters(), "
                    "update_in_backward=True) uses each one as soon as it is there"
                )
                raise
        into = Region(self._block, 0, incoming.nbytes)
        self.landing, self.holding = self._tiers.links.copy(incoming, into, self._group.name), Holding.LANDING

    def _put_beside(self, incoming: MemoryBlock, beside: list[Segment], target: HostBlock) -> None:
        self.await_landing()
        item, tickets = self._dtype.itemsize, []
        for segment in beside:
            source = Region(incoming, segment.shard_start * item, segment.numel * item)
            tickets.append(self._tiers.links.copy(source, Region(target, source.offset, source.nbytes), self._group.name))
        self.square_sum, self.landing, self.holding = None, Joined(tickets), Holding.LANDING

    def _finish(self, incoming: MemoryBlock) -> None:
        """The copy holds on to its memory."""

    def _source(self) -> torch.Tensor:
        assert self._block is not None
        return self._block.view(self._dtype)[: self._group.own_numel]

    def rest(self, write: bool = False) -> torch.Tensor:
        value = super().rest(write)
        if write:
            self._group.pending.settle_update()  # it may be reading what is zeroed now
        return value

    @property
    def lends(self) -> bool:
        return self._block is not None

    def let_go(self) -> None:
        self._give_back()
        # Still on its way, perhaps: whoever needs its memory on the device waits for that.
        self.holding, self.gone = Holding.USED, True

    def clear(self) -> None:
        self._give_back()
        super().clear()

    def _give_back(self) -> None:
        block, self._block = self._block, None
        if block is not None:
            users = (self.landing, self._group.pending.update)
            self._loans.give_back(block, [ticket for ticket in users if ticket is not None])


class OnDisk(Away):
    """Lands on disk. A further pass is added by reading, adding and writing back the whole, in fp32.

    The first sum in fp32 grows the place to that size. Later first passes use its head, so stores of several dtypes share
    their bytes, and only one of them may be out as a tensor.
    """

    def __init__(self, group: Group, tiers: Tiers, dtype: torch.dtype, rank: int) -> None:
        super().__init__(group, tiers, dtype, rank)
        self._stores: dict[torch.dtype, Store] = {}
        self._now: Store | None = None
        """The one that holds the gradient."""

    def _begin(self, incoming: MemoryBlock, beside: list[Segment] | None) -> None:  # noqa: ARG002 (a sum is as exact)
        if self.holding is Holding.NOTHING:
            self.square_sum = self._measure(incoming.view(self._dtype))
            self._now = self._store(self._dtype)
            self.landing = self._tiers.links.copy(incoming, self._now.block, self._group.name)
            self.holding = Holding.LANDING

    def _finish(self, incoming: MemoryBlock) -> None:
        if self.holding is Holding.LANDING:
            self.await_landing()  # a copy to disk reads its source to the end
        else:
            self._add(incoming.view(self._dtype))

    def _source(self) -> Store:
        assert self._now is not None
        return self._now

    def _add(self, arrived: torch.Tensor) -> None:
        before = self._source().tensor(write=False).to(self._wide, copy=True)
        self._group.pending.staging.close()
        if self._wide not in self._stores:
            self._stores.pop(self._dtype).free()
        self._now = self._store(self._wide)
        total = self._now.tensor()
        torch.add(before, arrived.to(total.device), out=total)
        self.square_sum = self._measure(total)
        self._group.pending.staging.close()

    def _store(self, dtype: torch.dtype) -> Store:
        for other in self._stores.values():
            if other.dtype is not dtype:
                other.go_back()
        if dtype not in self._stores:
            group, label = self._group, f"gradient of group {self._group.name}"
            wider = next(iter(self._stores.values()), None)
            head = None
            if wider is not None:
                block = wider.block
                assert isinstance(block, DiskBlock)
                head = block.head(group.own_numel * dtype.itemsize)
            self._stores[dtype] = Store(self._tiers, group.pending, "disk", group.own_numel, dtype, label, block=head)
        return self._stores[dtype]


def place_of(
    group: Group, tiers: Tiers, ranks: Ranks, dtype: torch.dtype, keep_flat: bool, loans: Loans | None
) -> LandingPlace:
    """Where a group's gradient lands: where its update runs. ``loans``: it is not kept, and goes through this memory."""
    if group.home.tier == "device":
        return OnDevice(group, tiers, dtype, keep_flat=keep_flat, transient=loans is not None)
    if loans is not None:
        return PassingThrough(group, tiers, dtype, ranks.rank, loans)
    return (OnDisk if group.home.grads == "disk" else OnHost)(group, tiers, dtype, ranks.rank)
