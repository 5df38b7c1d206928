"""A storage that autograd saved and that left the device: where it is, and the host memory that it uses."""

import contextlib
from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any, TypeAlias

import torch

from unwall.native import interrupts
from unwall.tiers.block import DiskBlock
from unwall.tiers.host import HostBlock, HostTier
from unwall.tiers.ledger import BudgetError
from unwall.tiers.ticket import Ticket

Done: TypeAlias = "torch.cuda.Event | None"
"""When a copy has ended."""


class Shelf:
    """Host memory for activations. What was used once is used again: sizes repeat from step to step."""

    def __init__(self, host: HostTier) -> None:
        self._host = host
        self._free: defaultdict[int, deque[tuple[HostBlock, Done]]] = defaultdict(deque)
        self.most_bytes: int | None = None
        """What it may take of the host. None: what the host's ledger allows."""
        self.spare: Callable[[int], int] = lambda _: 0
        """Of a size so many blocks stay when it is cleared."""
        self._taken = 0
        host.ledger.ask_before_refusing(self.clear)

    def take(self, nbytes: int) -> "tuple[HostBlock, Done] | None":
        """A block, and what must have ended before it is written. None where the host has no room for it."""
        try:
            return self._free[nbytes].popleft()
        except IndexError:
            pass
        if self.most_bytes is not None and self._taken + nbytes > self.most_bytes:
            return None
        try:
            block = self._host.allocate(nbytes, "activations", pinned=True)
        except BudgetError:
            return None
        self._taken += nbytes
        return block, None

    def put(self, block: HostBlock, done: "Done") -> None:
        """From any thread, at any moment: a graph that is dropped gives its blocks back. ``done``: the last copy of it."""
        self._free[block.nbytes].append((block, done))

    def clear(self) -> None:
        """Frees what nobody uses."""
        for nbytes, blocks in list(self._free.items()):
            while len(blocks) > self.spare(nbytes):
                block, done = blocks.pop()
                if done is not None:
                    done.synchronize()
                self._taken -= block.nbytes
                self._host.free(block)


class Leaving:
    """A tensor whose storage is being copied to the host: held until that has ended."""

    __slots__ = ("done", "nbytes", "stream", "tensor", "version")

    def __init__(self, tensor: torch.Tensor, nbytes: int) -> None:
        self.tensor: torch.Tensor | None = tensor
        self.version = tensor._version
        self.nbytes = nbytes
        self.done: Done = None
        """None without an accelerator: copies end before they return."""
        self.stream: Any = torch.cuda.current_stream(tensor.device) if tensor.is_cuda else None
        """Whose memory it is."""

    def changed(self) -> bool:
        return self.tensor is not None and self.tensor._version != self.version


class Moved:
    """A storage that was saved: on its way out, on the host, on disk, or on its way back."""

    __slots__ = (
        "__weakref__",
        "_origin",
        "_shelf",
        "arrived",
        "back",
        "block",
        "leaving",
        "nbytes",
        "number",
        "on_disk",
        "spoiled",
        "stream",
        "ticket",
        "uses",
    )

    def __init__(self, shelf: Shelf, block: HostBlock, tensor: torch.Tensor, number: int) -> None:
        self._shelf = shelf
        self._origin = tensor.untyped_storage()._weak_ref()
        self.block: HostBlock | None = block
        """None: it is on disk alone, or on the device again."""
        self.nbytes = block.nbytes
        self.on_disk: DiskBlock | None = None
        self.ticket: Ticket | None = None
        """The disk writes from its block, or reads into it."""
        self.number = number
        """Its place in the order of saving."""
        self.leaving = Leaving(tensor.detach(), block.nbytes)
        self.spoiled = False
        """It was changed while it was copied."""
        self.back: torch.UntypedStorage | None = None
        """The storage that it came back in."""
        self.arrived: Done = None
        """The copy to the device has ended."""
        self.stream: Any = None
        """Whose memory it came back in."""
        self.uses = 0
        """How many have saved it and not used it yet."""

    def is_of(self, tensor: torch.Tensor) -> bool:
        """Whether it is a copy of this tensor as it is now. While we know of a storage its address is no other's."""
        return self.leaving.version == tensor._version and not torch.UntypedStorage._expired(self._origin)

    def __del__(self) -> None:
        with interrupts.finalizing:
            self._finalize()

    def _finalize(self) -> None:
        leaving = getattr(self, "leaving", None)  # None: interrupted while it was made
        if leaving is None:
            return
        torch.UntypedStorage._free_weak_ref(self._origin)
        if leaving.done is not None and not leaving.done.query():
            leaving.stream.wait_event(leaving.done)  # the memory is used again after that, not before
        if self.back is not None and self.arrived is not None and not self.arrived.query():
            self.stream.wait_event(self.arrived)
        leaving.tensor = None
        if self.ticket is not None:
            with contextlib.suppress(Exception):  # nobody needs what failed
                self.ticket.wait()
        self.give_back()

    def give_back(self) -> None:
        """The block on the host can be used again, once the last copy from it or into it has ended."""
        block, self.block = self.block, None
        if block is not None:
            self._shelf.put(block, self.arrived or self.leaving.done)
