"""The states of a model as they are now, for a save that goes on beside training.

[Note: snapshot]
Nothing is copied. Blocks on disk are cloned (tiers/clone.py) where the file system can share extents and has room: the save
reads the clone, and whoever changes the blocks does not wait. Each other block of the model's states is lent to the save:
``Block.reader``. Whoever would change a block waits until it is written, which is mostly the thread that updates, so forward
and backward go on: the update of the first groups is what the next forward waits for, and the save takes them in that order.
A group that is updated ahead of the step needs no wait at all: its new values are in another block (optim/shadows.py), the
old one stays as it is until the save has read it. Updates that were asked for before have ended by then; those ahead of a
step do not touch the blocks of the states, or wait until they are read as well (optim/journaled.py).
"""

import threading
from collections.abc import Sequence
from dataclasses import replace

from unwall.checkpoint.lots import Lot
from unwall.tiers.block import Block, DiskBlock
from unwall.tiers.clone import DiskClone
from unwall.tiers.disk import DiskTier


class Loan:
    """The blocks of one lot, lent until they are read."""

    def __init__(self, lot: Lot) -> None:
        self._read = threading.Event()
        cloned = lot.clone is not None
        self._blocks: list[Block] = [held.block for held in lot.held if not (cloned and isinstance(held.block, DiskBlock))]
        for block in self._blocks:
            block.reader = self

    def wait(self) -> None:
        """By whoever would change a block."""
        self._read.wait()

    def end(self) -> None:
        """The save has read the blocks, or will not."""
        for block in self._blocks:
            block.reader = None
        self._read.set()


class Loans:
    """All lots of a save that goes on beside training, which writes ``nbytes``."""

    def __init__(self, lots: Sequence[Lot], disk: DiskTier | None, nbytes: int) -> None:
        self._clone = None if disk is None else _clone(lots, disk, nbytes)
        self._open = {id(lot): Loan(lot) for lot in lots}

    def end(self, lot: Lot) -> None:
        self._open.pop(id(lot)).end()

    def end_all(self) -> None:
        while self._open:
            self._open.popitem()[1].end()
        clone, self._clone = self._clone, None
        if clone is not None:
            clone.close()


def _clone(lots: Sequence[Lot], disk: DiskTier, nbytes: int) -> DiskClone | None:
    """The lots' blocks on disk are read from a clone from now on, if there can be one."""
    blocks = [held.block for lot in lots for held in lot.held if isinstance(held.block, DiskBlock)]
    clone = disk.clone(list(dict.fromkeys(blocks)), nbytes)
    if clone is None:
        return None
    for lot in lots:
        # Blocks of their own: those of the states may be freed before the save has read them.
        lot.held = tuple(
            replace(held, block=held.block.head(held.block.nbytes)) if isinstance(held.block, DiskBlock) else held
            for held in lot.held
        )
        lot.clone = clone
    return clone
