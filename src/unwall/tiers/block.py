"""What a tier hands out, and the protocol of the tiers."""

import weakref
from collections import deque
from dataclasses import dataclass
from typing import Protocol

import torch

from unwall.native import interrupts
from unwall.native.ticket import NativeTicket
from unwall.tiers.extents import Extent
from unwall.tiers.ledger import Ledger, TierName
from unwall.tiers.sizes import ALIGNMENT


class FreedError(RuntimeError):
    """A block was used, or freed again, after it had been freed."""


class Reader(Protocol):
    """Who still reads a block as it is."""

    def wait(self) -> None:
        """Until it has read it."""
        ...


class Block:
    """Bytes on a tier. Life cycle: allocated by its tier, freed once by it; any use after that raises FreedError.

    One that is dropped without being freed (an exception came between) is counted no more.
    """

    charged_bytes = 0
    """What the ledger counts for it."""

    def __init__(self, ledger: Ledger, nbytes: int, label: str) -> None:
        self.ledger = ledger
        """The account of the tier that allocated it, which says whose block this is."""
        self.nbytes = nbytes
        self.label = label
        self.reader: Reader | None = None
        """A snapshot that is being written (checkpoint/snapshot.py): whoever would change the block waits for it first."""
        self._freed = False

    def __del__(self) -> None:
        if self.charged_bytes:
            with interrupts.finalizing:
                self.ledger.abandon(self.charged_bytes)

    @property
    def tier(self) -> TierName:
        return self.ledger.tier

    @property
    def freed(self) -> bool:
        return self._freed

    def await_reader(self) -> None:
        """Before its bytes are changed."""
        reader = self.reader
        if reader is not None:
            reader.wait()

    def check_live(self) -> None:
        if self._freed:
            raise FreedError(f"the {self.tier} block '{self.label}' of {self.nbytes} bytes was already freed")

    def mark_freed(self, ledger: Ledger) -> None:
        """The first thing every ``free`` does, with its own account: a block goes back where it came from, and once."""
        self.check_live()
        if ledger is not self.ledger:
            raise ValueError(f"{self!r} was not allocated by this {ledger.tier} tier: free it where it came from")
        self._freed = True

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.tier}, {self.nbytes} bytes, '{self.label}'{', freed' if self._freed else ''})"


class MemoryBlock(Block):
    """Bytes that a tensor can view (device or host)."""

    def __init__(self, ledger: Ledger, nbytes: int, label: str, data: torch.Tensor | None = None) -> None:
        super().__init__(ledger, nbytes, label)
        if data is not None:
            self._data = data

    def fill(self, data: torch.Tensor) -> None:
        """The memory, which its tier has taken after it was counted."""
        self._data = data

    @property
    def data(self) -> torch.Tensor:
        """All bytes as a uint8 tensor. Views of it stay valid memory even after the block was freed."""
        self.check_live()
        return self._data

    @property
    def deflated(self) -> bool:
        """True while the device tier has taken the memory away."""
        return self.data.untyped_storage().nbytes() == 0

    def view(self, dtype: torch.dtype, numel: int | None = None, offset_bytes: int = 0) -> torch.Tensor:
        """A flat tensor of ``numel`` elements (as many as fit when None) that starts at ``offset_bytes``."""
        if not 0 <= offset_bytes <= self.nbytes or offset_bytes % dtype.itemsize:
            raise ValueError(f"byte {offset_bytes} of {self!r} is no place for a {dtype}: use a multiple of {dtype.itemsize}")
        room = self.nbytes - offset_bytes
        numel = room // dtype.itemsize if numel is None else numel
        if numel < 0 or numel * dtype.itemsize > room:
            raise ValueError(f"{numel} elements of {dtype} from byte {offset_bytes} do not fit into {self!r}")
        return self.data[offset_bytes : offset_bytes + numel * dtype.itemsize].view(dtype)

    def mark_freed(self, ledger: Ledger) -> None:
        super().mark_freed(ledger)
        self.__dict__.pop("_data", None)


class DiskBlock(Block):
    """Bytes on disk: one extent, or several when the file has only small holes left."""

    extents: tuple[Extent, ...] = ()
    lost: deque[tuple[tuple[Extent, ...], list[NativeTicket]]] | None = None
    """Where its tier finds the extents, and what is in flight on them, if it is dropped without being freed."""

    def __init__(self, ledger: Ledger, nbytes: int, label: str, extents: tuple[Extent, ...]) -> None:
        super().__init__(ledger, nbytes, label)
        self.extents = extents
        self.in_flight: weakref.WeakSet[NativeTicket] = weakref.WeakSet()
        """Requests on the extents. Weak: a ticket that is dropped has waited for its request in its finaliser."""

    def __del__(self) -> None:
        with interrupts.finalizing:
            if self.lost is not None and not self._freed and self.extents:
                self.lost.append((self.extents, list(self.in_flight)))
            super().__del__()

    def head(self, nbytes: int) -> "DiskBlock":
        """The first bytes of this block as a block, to be used in its place for a while. It is not freed."""
        if not 0 < nbytes <= self.nbytes:
            raise ValueError(f"the first {nbytes} bytes are not a part of {self!r}")
        part = DiskBlock(self.ledger, nbytes, self.label, self.extents)
        part.in_flight = self.in_flight
        return part

    def pieces(self, offset: int, nbytes: int) -> list[tuple[Extent, int]]:
        """File extents that hold ``nbytes`` from ``offset`` on, each with its position relative to ``offset``."""
        self.check_live()
        found: list[tuple[Extent, int]] = []
        start = 0
        for extent in self.extents:
            low, high = max(start, offset), min(start + extent.nbytes, offset + nbytes)
            if low < high:
                found.append((Extent(extent.offset + low - start, high - low), low - offset))
            start += extent.nbytes
        return found


@dataclass(frozen=True)
class Region:
    """A run of bytes inside a block: one end of a copy."""

    block: Block
    offset: int
    nbytes: int

    def __post_init__(self) -> None:
        self.block.check_live()
        if self.nbytes <= 0 or self.offset < 0 or self.end > self.block.nbytes:
            raise ValueError(f"bytes {self.offset} to {self.end} are not a part of {self.block!r}")
        if self.block.tier == "disk" and self.offset % ALIGNMENT:
            raise ValueError(f"a disk region starts at a multiple of {ALIGNMENT} bytes, got offset {self.offset}")

    @property
    def end(self) -> int:
        return self.offset + self.nbytes

    @staticmethod
    def whole(block: Block) -> "Region":
        return Region(block, 0, block.nbytes)

    def part(self, position: int, nbytes: int) -> "Region":
        """``nbytes`` of this region that begin ``position`` bytes after its start."""
        return Region(self.block, self.offset + position, nbytes)


class Tier(Protocol):
    """A place for bytes with a budget."""

    name: TierName
    ledger: Ledger

    def allocate(self, nbytes: int, label: str = "") -> Block:
        """``nbytes`` of this tier. BudgetError past the budget, the system's own error when the system refuses."""
        ...

    def free(self, block: Block) -> None:
        """Gives the bytes back. A second free of the same block raises FreedError, another tier's block a ValueError."""
        ...

    def close(self) -> None: ...


def check_size(nbytes: int, tier: str) -> None:
    """The check that every ``allocate`` begins with."""
    if nbytes <= 0:
        raise ValueError(f"{tier} tier: a block has at least one byte, got {nbytes}")
