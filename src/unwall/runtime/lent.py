"""One parameter's whole value, in the user's hands: see [Note: lent values] in runtime/outside.py."""

import weakref

import torch
from torch import nn

from unwall.shards.flat import storage_uses
from unwall.shards.local import is_distributed, local

MOST_TWINS = 64
"""Counters that are kept of one value's ``.data`` before those that are not needed any more are looked for."""


class Lent:
    """One parameter's whole value, in the user's hands."""

    def __init__(self, param: nn.Parameter, tensor: torch.Tensor, version: int) -> None:
        self.param = param
        self.tensor = tensor
        self.version = version
        """``Outside._age`` when it was read: the value is the parameter's as long as that stays."""
        self.storage: int = local(tensor).untyped_storage()._cdata
        self.warned = False
        self._kept = self._wrote = False
        self._seen = version_of(tensor)
        self._twins: list[tuple[torch.Tensor, int]] = []
        self._aliases: list[weakref.ref[torch.Tensor]] = []
        self._own_uses = storage_uses(local(tensor))
        self._sums = _sums(tensor) if tensor.device.type == "cpu" else None  # a numpy array may be made without our seeing it

    def succeeded_by(self, tensor: torch.Tensor) -> "Lent":
        """``param.data = tensor``: from now on that is the value, and counts as written. This one is the user's, if he has a
        part of it: as in torch it keeps what it had."""
        following = Lent(self.param, tensor, self.version)
        following._own_uses = self._own_uses  # whatever else refers to it is the user's
        if not local(tensor).untyped_storage().resizable():
            following._sums = None  # a file's or an array's memory from the beginning: sums would read it all at every edge
        following._wrote = True
        return following

    def handed_out(self, result: torch.Tensor, counter: bool = False) -> None:
        """The user has got a tensor that shares the memory. ``counter``: it has a version counter of its own."""
        if result.grad_fn is None:
            self._aliases = [known for known in self._aliases if known() is not None]
            self._aliases.append(weakref.ref(result))
        if counter:
            if len(self._twins) >= MOST_TWINS and len(self._aliases) == 1 and not self._held_by_more_than(1):
                self._wrote |= self._counted
                self._twins.clear()
            self._twins.append((result.detach(), version_of(result)))  # shares the counter, and outlives what it counts for

    def keep(self) -> None:
        """The user has got something that shares the memory without being a tensor: taken back at the next edge."""
        self._kept = True
        if self._sums is None:
            self._sums = _sums(self.tensor)

    @property
    def _counted(self) -> bool:
        return version_of(self.tensor) != self._seen or any(version_of(tensor) != seen for tensor, seen in self._twins)

    @property
    def written(self) -> bool:
        """Whether a version counter says so."""
        return self._wrote or self._counted

    @property
    def changed(self) -> bool:
        """The same where nothing counts what is written: at an address, or in a numpy array."""
        if self.written or self._sums is None:
            return self.written
        uncounted = self._kept or not local(self.tensor).untyped_storage().resizable()
        return uncounted and not torch.equal(_sums(self.tensor), self._sums)

    @property
    def held(self) -> bool:
        """Whether anybody else has a part of it."""
        return self._held_by_more_than(0)

    def _held_by_more_than(self, others: int) -> bool:
        uses = storage_uses(local(self.tensor))
        if uses is None or self._own_uses is None:
            return self.looked_at
        return uses > self._own_uses + len(self._twins) + others

    @property
    def looked_at(self) -> bool:
        """Whether the user still has a tensor of it."""
        return any(alias() is not None for alias in self._aliases)

    def taken(self) -> None:
        """What was written has been taken."""
        self._wrote = False
        self._sums = None if self._sums is None else _sums(self.tensor)
        self._seen = version_of(self.tensor)
        self._twins = [(tensor, version_of(tensor)) for tensor, _ in self._twins]


def version_of(tensor: torch.Tensor) -> int:
    """Counts what is written: see [Note: two faces of a DTensor] in shards/local.py."""
    return tensor._version + local(tensor)._version if is_distributed(tensor) else tensor._version


_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _sums(tensor: torch.Tensor) -> torch.Tensor:
    """Two sums that hardly any change leaves as they are: of the bits, and of the values."""
    flat = local(tensor).detach().reshape(-1)
    bits = flat.view(_BITS[tensor.itemsize])
    values = flat if tensor.itemsize > 1 else bits
    return torch.stack((bits.sum(dtype=torch.int64), values.sum(dtype=torch.float64).view(torch.int64)))
