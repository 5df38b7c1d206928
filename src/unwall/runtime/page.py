"""A parameter under construction: its storage, or this rank's part of its bytes.

[Note: nothing to move]
The part of a rank alone is all of a parameter: in host memory it stays where it is, and only what goes to disk is taken out.
An operation that writes all of a storage and reads nothing of it (``normal_``) needs its memory back, but not its bytes; these
are kept until the operation has ended well.
"""

import weakref
from typing import NamedTuple

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from unwall.native.memory import HostMemory
from unwall.runtime.load_check import digest_of
from unwall.runtime.shelf import Shelf, Shelved
from unwall.shards.collectives import Ranks
from unwall.shards.control import DivergedError
from unwall.tiers.workers import shared_pool

MAPPED_BYTES = 1 << 20
"""Parts of this size and more are mapped, and their pages brought in by all workers."""
waiting = WeakIdKeyDictionary()
"""Parameters of models that were built, each with its page and its place there."""


class Page:
    """The storage of a parameter under construction (or of several that share it), or this rank's part of its bytes."""

    def __init__(self, param: nn.Parameter, ranks: Ranks, shelf: Shelf, number: int = 0, name: str = "") -> None:
        self._params = [weakref.ref(param)]
        self._storage = param.untyped_storage()
        self._number = number
        self._name = name
        self.key = self._storage._cdata
        self.nbytes = self._storage.nbytes()
        self._ranks = ranks
        self._shelf = shelf
        self._part: torch.Tensor | Shelved | None = None
        self._stays = ranks.size == 1 and self._storage.device.type == "cpu"
        """See [Note: nothing to move]."""

    def add(self, param: nn.Parameter) -> None:
        """Another parameter lies in the same storage (``Parameter(weight.data)``)."""
        if all(known() is not param for known in self._params):
            self._params.append(weakref.ref(param))

    @property
    def host_bytes(self) -> int:
        """What its part takes of the host's memory."""
        return self._part.nbytes if isinstance(self._part, torch.Tensor) else 0

    @property
    def is_out(self) -> bool:
        return self._part is not None

    @property
    def gave_back(self) -> bool:
        """Whether its storage has no memory now."""
        return self._storage.nbytes() == 0

    def out(self) -> None:
        """Puts this rank's part on the shelf and gives the storage's memory back. All ranks do it together."""
        part_bytes = -(-self.nbytes // self._ranks.size)
        low = min(self._ranks.rank * part_bytes, self.nbytes)
        high = min(low + part_bytes, self.nbytes)
        whole = self._whole()
        if self._stays:
            self._part = self._shelf.put(whole)
            if isinstance(self._part, Shelved):
                self._storage.resize_(0)
            return
        if self._ranks.size > 1:
            digests = self._meet(0, digest_of(whole))
            if any(digest != digests[0] for digest in digests):
                whole = self._from_rank_0(whole)
        part = _zeros(part_bytes)
        part[: high - low] = whole[low:high]
        self._part = self._shelf.put(part)
        self._storage.resize_(0)

    def _whole(self) -> torch.Tensor:
        """The bytes of the storage."""
        return torch.empty(0, dtype=torch.uint8, device=self._storage.device).set_(self._storage)

    def bring_back(self) -> None:
        """Gives the storage its memory and its bytes again."""
        assert self._part is not None
        if not self._stays or isinstance(self._part, Shelved):
            whole = self._gather()
            self._storage.resize_(self.nbytes)
            self._whole().copy_(whole)
        self._part = None

    def make_room(self) -> None:
        """Gives the storage its memory: whatever is in it will be overwritten. ``bring_back`` or ``forget`` follows."""
        if self._storage.nbytes() != self.nbytes:
            self._storage.resize_(self.nbytes)

    def forget(self) -> None:
        """What was taken out is of no use any more."""
        self._part = None

    def value(self, like: "Geometry") -> torch.Tensor:
        """A whole parameter, on the host, as it was initialised."""
        return self._gather().view(like.dtype).as_strided(like.shape, like.stride, like.offset)

    def _gather(self) -> torch.Tensor:
        assert self._part is not None
        part = self._part.get() if isinstance(self._part, Shelved) else self._part
        if self._ranks.size == 1:
            return part
        self._meet(1, 0)
        whole = torch.empty(part.numel() * self._ranks.size, dtype=torch.uint8)
        self._ranks.all_gather_on_host(whole, part)
        return whole[: self.nbytes]

    def _meet(self, what: int, digest: int) -> list[int]:
        """Every rank's digest. DivergedError where another rank is at another page."""
        mine = [what, self._number, self.nbytes, digest]
        rows = self._ranks.control.exchange("a page", mine, f"building {self._name} inside unwall.init")
        for rank, row in enumerate(rows):
            if row[:3] != mine[:3]:
                raise DivergedError(
                    f"inside unwall.init, rank {self._ranks.rank} is at parameter {self._number} ({self._name}, {self.nbytes} "
                    f"bytes) and rank {rank} at parameter {row[1]} ({row[2]} bytes): all ranks build the same model, and write "
                    "its parameters in the same order. Load into it on every rank, or after unwall.shard"
                )
        return [row[3] for row in rows]

    def _from_rank_0(self, whole: torch.Tensor) -> torch.Tensor:
        """The ranks drew other values."""
        every = self._ranks.broadcast_object(whole.cpu() if self._ranks.rank == 0 else None)
        assert isinstance(every, torch.Tensor)
        return every

    def holds(self, param: nn.Parameter) -> bool:
        """Whether a parameter still lies here: ``param.data = ...`` gives it another storage."""
        return bool(param.untyped_storage()._cdata == self.key)

    def moved_away(self) -> list[nn.Parameter]:
        """Parameters that were given another storage since. They do not belong here any more."""
        alive = [param for param in (known() for known in self._params) if param is not None]
        gone = [param for param in alive if not self.holds(param)]
        self._params = [weakref.ref(param) for param in alive if self.holds(param)]
        return gone

    def seal(self) -> bool:
        """The model is built: its parameters show NaN until ``shard`` takes their values from here. False where no parameter
        is left: then whatever else uses the storage needs its bytes."""
        alive = [param for param in (known() for known in self._params) if param is not None]
        for param in alive:
            like = Geometry(param.shape, param.stride(), int(param.storage_offset()), param.dtype)
            fill = float("nan") if like.dtype.is_floating_point else 0
            param.data = torch.full((), fill, dtype=like.dtype, device=self._storage.device).expand(like.shape)
            waiting[param] = (self, like)
        return bool(alive)


class Geometry(NamedTuple):
    """Where a parameter lies in its storage."""

    shape: torch.Size
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype


def _zeros(nbytes: int) -> torch.Tensor:
    if nbytes < MAPPED_BYTES:
        return torch.zeros(nbytes, dtype=torch.uint8)
    return torch.frombuffer(HostMemory(nbytes, shared_pool()).buffer(), dtype=torch.uint8)
