"""The device tier: the accelerator's memory, or plain memory with its own accounting where there is none."""

import os
from collections.abc import Callable
from typing import TypeVar

import torch

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
    """

    name: TierName = "device"

    def __init__(self, device: torch.device | None = None, budget_bytes: int | None = None) -> None:
        self.device = default_device() if device is None else device
        self.ledger = Ledger("device", budget_bytes)

    def allocate(self, nbytes: int, label: str = "") -> MemoryBlock:
        check_size(nbytes, self.name)
        self.ledger.reserve(nbytes, label)
        try:
            data = self._insist(lambda: torch.empty(nbytes, dtype=torch.uint8, device=self.device))
        except BaseException:
            self.ledger.release(nbytes)
            raise
        return MemoryBlock(self.ledger, nbytes, label, data)

    def free(self, block: Block) -> None:
        charged = isinstance(block, MemoryBlock) and block.charged
        block.mark_freed(self.ledger)
        if charged:
            self.ledger.release(block.nbytes)

    def deflate(self, block: MemoryBlock) -> None:
        """Takes the block's memory away and keeps its storage object. Nothing to do where it has none.

        RuntimeError, and nothing is changed, for a storage that cannot be resized (someone made a numpy array of it).
        """
        block.data.untyped_storage().resize_(0)
        self._account(block)

    def inflate(self, block: MemoryBlock) -> None:
        """Gives the block memory again, with undefined content. Nothing to do where it has some."""
        self._account(block)
        if not block.charged:
            self.ledger.reserve(block.nbytes, block.label)
            block.charged = True
        try:
            self._insist(lambda: block.data.untyped_storage().resize_(block.nbytes))
        finally:
            self._account(block)

    def _insist(self, take: Callable[[], Taken]) -> Taken:
        """Takes memory. Where the card has none, what others can do without is given back first: then it is tried again."""
        try:
            return take()
        except torch.OutOfMemoryError:
            self.ledger.reclaim()
            if self.device.type == "cuda":
                torch.cuda.empty_cache()
            return take()

    def _account(self, block: MemoryBlock) -> None:
        """The ledger counts what the block has, whatever was interrupted before."""
        if block.charged and block.deflated:
            block.charged = False
            self.ledger.release(block.nbytes)

    def close(self) -> None:
        """Nothing to do: memory goes with its blocks."""
