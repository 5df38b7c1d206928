"""One state of a group's owned run, wherever it lives, and as a tensor when someone looks at it.

[Note: settled]
An update of a group may be under way on the host, and a state on disk may be out as a tensor, changed and not yet written back.
Whoever reads a state must come after both. So a store hands out nothing before: ``tensor`` and ``block`` wait for the group's
update (and raise what it failed with), and ``block`` first writes back what was looked at. An update itself takes its blocks
before it begins, and gives new ones back with ``exchange``. A fetch needs the parameters alone: ``fetched_block`` does not wait
until other states are on disk.

An update ahead of its step may have been made in place (optim/journaled.py). It does not count yet, so whoever reads a state,
or would change the gradient that it has used, takes it back first. Reading the gradient does not.

[Note: staging]
On device and host a state is a tensor all the time. On disk it becomes one, in host memory, when it is asked for, and goes
back when the next group is asked for or before anything else reads the disk. Only one group's states are out at a time, so
looking through a whole model needs memory for one group.
"""

from typing import Protocol

import torch

from unwall.native.library import DiskError
from unwall.tiers.block import Block, DiskBlock, MemoryBlock
from unwall.tiers.disk import named
from unwall.tiers.host import HostBlock
from unwall.tiers.ledger import TierName
from unwall.tiers.ticket import Ticket
from unwall.tiers.tiers import Tiers


class Staging:
    """The disk states of a model that are out as tensors. See [Note: staging]."""

    def __init__(self) -> None:
        self._out: list[Store] = []

    def add(self, store: "Store") -> None:
        if self._out and self._out[0].pending is not store.pending:
            self.close()
        self._out.append(store)

    def drop(self, store: "Store") -> None:
        """One that is not out any more: nothing is written."""
        if store in self._out:
            self._out.remove(store)

    def close(self) -> None:
        """Writes back what was changed and frees the memory. After a DiskError nothing is lost: call it again."""
        while self._out:
            self._out[-1].go_back()


class Ahead(Protocol):
    """An update in place of which it is not known yet whether it counts."""

    def take_back(self) -> None:
        """The states are as before. May be called again."""
        ...


class Update(Ticket, Protocol):
    """An update of a group that is under way on the host."""

    def params_done(self) -> bool:
        """Whether ``wait_for_params`` would not block."""
        ...

    def wait_for_params(self) -> None:
        """The new parameters can be read, if not yet all states. Raises what the update failed with by then."""
        ...


class Pending:
    """What is under way on one group's states; all stores of the group share it. See [Note: settled]."""

    def __init__(self, staging: Staging) -> None:
        self.staging = staging
        self.update: Update | None = None
        self.ahead: Ahead | None = None
        """An update ahead of its step, in place."""

    @property
    def updating(self) -> bool:
        """Whether an update is still at work on the parameters, has failed and is to be tried again, or may be taken back."""
        return self.ahead is not None or (self.update is not None and not self.update.params_done())

    def settle(self) -> None:
        """Takes back what is ahead of its step, and waits for an update that is under way; raises what it failed with. Then it
        stays, and the next use tries again."""
        self._take_back()
        self.settle_update()

    def settle_params(self) -> None:
        """The same, but does not wait for what else an update writes once the parameters are there."""
        self._take_back()
        if self.update is not None and not self.update.done():
            self.update.wait_for_params()
        else:
            self.settle_update()

    def _take_back(self) -> None:
        if self.ahead is not None:
            self.ahead.take_back()
            self.ahead = None

    def settle_update(self) -> None:
        """Waits for an update that is under way. What is ahead of its step stays."""
        if self.update is not None:
            self.update.wait()
            self.update = None


class Store:
    """``numel`` elements of ``dtype`` on a tier, zeros at first (or in a ``block`` that is there already)."""

    def __init__(
        self,
        tiers: Tiers,
        pending: Pending,
        tier: TierName,
        numel: int,
        dtype: torch.dtype,
        label: str,
        *,
        pinned: bool = False,
        block: Block | None = None,
        gradient: bool = False,
    ) -> None:
        self.dtype = dtype
        self.numel = numel
        self.label = label
        self.pending = pending
        self.pinned = pinned
        self._block: Block = tiers.zeros(tier, numel, dtype, label, pinned=pinned) if block is None else block
        self._tiers = tiers
        self._staged: HostBlock | None = None
        self._changed = False
        self._gradient = gradient
        """Updates only read it."""

    @property
    def tier(self) -> TierName:
        return self._block.tier

    @property
    def nbytes(self) -> int:
        return self._block.nbytes

    @property
    def on_disk(self) -> bool:
        return isinstance(self._block, DiskBlock)

    @property
    def block(self) -> Block:
        """The bytes where they live, up to date. See [Note: settled]."""
        self.pending.settle()
        self.go_back()
        return self._block

    @property
    def fetched_block(self) -> Block:
        """The same for the parameters, to be read only: their update has ended, if not that of other states."""
        self.pending.settle_params()
        self.go_back()
        return self._block

    def await_reader(self) -> None:
        """For the update that is under way, before it writes in place."""
        self._block.await_reader()

    def exchange(self, block: Block) -> Block:
        """Another block becomes the state, the one it had is given back. For the update that is under way: does not wait."""
        old, self._block = self._block, block
        old.label, block.label = block.label, old.label
        return old

    def tensor(self, write: bool = True) -> torch.Tensor:
        """The state as a tensor, up to date. Without ``write`` it must not be changed."""
        if self._gradient and not write:
            self.pending.settle_update()
        else:
            self.pending.settle()
        if isinstance(self._block, MemoryBlock):
            if write:
                self._block.await_reader()
            return self._block.view(self.dtype)
        if self._staged is None:
            self.pending.staging.add(self)
            staged = self._tiers.host.allocate(self._block.nbytes, f"{self.label}, looked at")
            try:
                self._tiers.links.copy(self._block, staged, self.label).wait()
            except DiskError as error:
                self._tiers.host.free(staged)
                raise named(error, f"reading the {self.label}") from error
            self._staged = staged
        self._changed |= write
        return self._staged.view(self.dtype)

    def part(self, start: int, end: int) -> torch.Tensor:
        """Some elements as they are in memory, for whoever has settled the group's states."""
        if not isinstance(self._block, MemoryBlock):
            raise RuntimeError(f"the {self.label} is on disk: take tensor()")
        return self._block.view(self.dtype, end - start, start * self.dtype.itemsize)

    def go_back(self) -> None:
        """The staged tensor, if there is one, goes back to disk."""
        if self._staged is not None and self._changed:
            self._block.await_reader()
            try:
                self._tiers.links.copy(self._staged, self._block, self.label).wait()
            except DiskError as error:
                raise named(error, f"writing the {self.label}") from error
        self._free_staged()

    def free(self) -> None:
        """Forgets the state. No update of the group may be under way."""
        self._free_staged()
        self._tiers.free(self._block)

    def _free_staged(self) -> None:
        staged, self._staged, self._changed = self._staged, None, False  # first: an interrupt may come while it is freed
        self.pending.staging.drop(self)
        if staged is not None:
            self._tiers.host.free(staged)
