"""One state of a group's owned run, wherever it lives, and as a tensor when someone looks at it.

[Note: staging]
On device and host a state is a tensor all the time. On disk it becomes one, in host memory, when it is asked for, and goes
back when the next group is asked for or before anything else reads the disk. Only one group's states are out at a time, so
looking through a whole model needs memory for one group.
"""

import torch

from unwall.native.library import DiskError
from unwall.tiers.block import Block, DiskBlock, MemoryBlock
from unwall.tiers.disk import named
from unwall.tiers.host import HostBlock
from unwall.tiers.ledger import TierName
from unwall.tiers.tiers import Tiers


class Staging:
    """The disk states that are out as tensors. See [Note: staging]."""

    def __init__(self) -> None:
        self._out: list[Store] = []

    def add(self, store: "Store") -> None:
        if self._out and self._out[0].group != store.group:
            self.close()
        self._out.append(store)

    def drop(self, store: "Store") -> None:
        """One that is not wanted any more: nothing is written."""
        if store in self._out:
            self._out.remove(store)

    def close(self) -> None:
        """Writes back what was changed and frees the memory. After a DiskError nothing is lost: call it again."""
        while self._out:
            self._out[-1].go_back()
            self._out.pop()


class Store:
    """``numel`` elements of ``dtype`` on a tier, zeros at first (or in a ``block`` that is there already)."""

    def __init__(
        self,
        tiers: Tiers,
        staging: Staging,
        tier: TierName,
        numel: int,
        dtype: torch.dtype,
        label: str,
        group: int,
        *,
        pinned: bool = False,
        block: Block | None = None,
    ) -> None:
        self.dtype = dtype
        self.numel = numel
        self.label = label
        self.group = group
        self.pinned = pinned
        self.block: Block = tiers.zeros(tier, numel, dtype, label, pinned=pinned) if block is None else block
        self._tiers = tiers
        self._staging = staging
        self._staged: HostBlock | None = None
        self._changed = False

    @property
    def on_disk(self) -> bool:
        return isinstance(self.block, DiskBlock)

    def tensor(self, write: bool = True) -> torch.Tensor:
        """The state as a tensor. Without ``write`` it must not be changed."""
        if isinstance(self.block, MemoryBlock):
            return self.block.view(self.dtype)
        if self._staged is None:
            self._staging.add(self)
            staged = self._tiers.host.allocate(self.block.nbytes, f"{self.label}, looked at")
            try:
                self._tiers.links.copy(self.block, staged, self.label).wait()
            except DiskError as error:
                self._tiers.host.free(staged)
                raise named(error, f"reading the {self.label}") from error
            self._staged = staged
        self._changed |= write
        return self._staged.view(self.dtype)

    def go_back(self) -> None:
        """The staged tensor goes back to disk."""
        if self._staged is None:
            return
        if self._changed:
            try:
                self._tiers.links.copy(self._staged, self.block, self.label).wait()
            except DiskError as error:
                raise named(error, f"writing the {self.label}") from error
        self._free_staged()

    def free(self) -> None:
        """Forgets the state."""
        self._staging.drop(self)
        self._free_staged()
        self._tiers.free(self.block)

    def _free_staged(self) -> None:
        if self._staged is not None:
            self._tiers.host.free(self._staged)
        self._staged, self._changed = None, False
