"""The device tier: the accelerator's memory, or plain memory with its own accounting where there is none."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch

from unwall.tiers.arena import arena_on
from unwall.tiers.block import Block, MemoryBlock, check_size
from unwall.tiers.ledger import Ledger, TierName

Taken = TypeVar("Taken")


def default_device() -> torch.device:
    """The accelerator this process computes on, or the CPU. Does not initialise the accelerator."""
    if torch.cuda.is_available():
        if torch.cuda.is_initialized():
            return torch.device("cuda", torch.cuda.current_device())
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())  # torchrun sets it
    return torch.device("cpu")


class DeviceTier:
    """Memory on ``device`` with an account.

    A block can be deflated (its storage shrinks to zero bytes, tensors that view it stay alive but must not be read) and
    inflated again: the same storage object gets memory back, so views that autograd saved become valid again.
    ``arenas``: its memory is apart from all other on an accelerator (tiers/arena.py).
    """

    name: TierName = "device"

    def __init__(self, device: torch.device | None = None, budget_bytes: int | None = None, *, arenas: bool = False) -> None:
        self.device = default_device() if device is None else device
        self.arena, self.inputs_arena = arena_on(self.device, arenas), arena_on(self.device, arenas)
        """For what this tier hands out, and for the inputs of recomputed blocks."""
        self.ledger = Ledger("device", budget_bytes)

    def allocate(self, nbytes: int, label: str = "") -> MemoryBlock:
        check_size(nbytes, self.name)
        block = MemoryBlock(self.ledger, nbytes, label)
        self.ledger.charge(block, nbytes, label)
        try:
            block.fill(self._insist(lambda: torch.empty(nbytes, dtype=torch.uint8, device=self.device)))
        except BaseException:
            self.ledger.discharge(block)
            raise
        return block

    def promise(self, nbytes: int, label: str = "") -> MemoryBlock:
        """A block that is counted from now on, and whose memory comes with ``keep``."""
        check_size(nbytes, self.name)
        block = MemoryBlock(self.ledger, nbytes, label)
        self.ledger.charge(block, nbytes, label)
        return block

    def keep(self, block: MemoryBlock, make: Callable[[], torch.Tensor]) -> None:
        """What ``make`` gives is the memory of a block that was promised."""
        block.fill(self._insist(lambda: make().view(torch.uint8)))

    @contextmanager
    def noting(self, nbytes: int, label: str) -> Iterator[None]:
        """Counts what operations inside take for themselves. Who calls it has made room; nothing is refused here."""
        block = MemoryBlock(self.ledger, nbytes, label)
        self.ledger.note(block, nbytes)
        try:
            yield
        finally:
            self.ledger.discharge(block)

    def free(self, block: Block) -> None:
        block.mark_freed(self.ledger)
        self.ledger.discharge(block)

    def deflate(self, block: MemoryBlock) -> None:
        """Takes the block's memory away and keeps its storage object. Nothing to do where it has none.

        RuntimeError, and nothing is changed, for a storage that cannot be resized (someone made a numpy array of it).
        """
        block.data.untyped_storage().resize_(0)
        self._account(block)

    def inflate(self, block: MemoryBlock) -> None:
        """Gives the block memory again, with undefined content. Nothing to do where it has some."""
        self._account(block)
        if not block.charged_bytes:
            self.ledger.charge(block, block.nbytes, block.label)
        try:
            self._insist(lambda: block.data.untyped_storage().resize_(block.nbytes))
        finally:
            self._account(block)

    def _insist(self, take: Callable[[], Taken]) -> Taken:
        """Takes memory. Where the card has none, what others can do without is given back first: then it is tried again."""
        try:
            return self._take(take)
        except torch.OutOfMemoryError:
            self.ledger.reclaim()
            self.give_back()
            return self._take(take)

    def _take(self, take: Callable[[], Taken]) -> Taken:
        if self.arena is None:
            return take()
        with self.arena.taking():
            return take()

    def give_back(self) -> None:
        """What the allocator has of the card, and nobody uses, is the card's again."""
        for arena in (self.arena, self.inputs_arena):
            if arena is not None:
                arena.renew()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def _account(self, block: MemoryBlock) -> None:
        """The ledger counts what the block has, whatever was interrupted before."""
        if block.deflated:
            self.ledger.discharge(block)

    def close(self) -> None:
        """Nothing to do: memory goes with its blocks."""
