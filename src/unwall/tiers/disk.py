"""The disk tier: one preallocated file per drive and rank, cut into extents."""

import contextlib
import errno
import shutil
import threading
from collections import deque
from collections.abc import Sequence
from pathlib import Path

from unwall.native.disk import DiskEngine, DiskFile, Operation
from unwall.native.interrupts import Gone
from unwall.native.library import DiskError, NativeError
from unwall.native.memory import HostMemory
from unwall.native.ticket import NativeTicket
from unwall.tiers.block import Block, DiskBlock, check_size
from unwall.tiers.claim import Claim, claim
from unwall.tiers.clone import CANNOT, DiskClone, share
from unwall.tiers.extents import Extent, FreeList
from unwall.tiers.host import local_ranks
from unwall.tiers.ledger import BudgetError, Ledger, TierName
from unwall.tiers.sizes import ALIGNMENT, align_up, format_bytes

GROWTH_BYTES = 256 << 20
STRIPE_BYTES = 4 << 20
_ZERO_BYTES = 4 << 20
_FULL = (errno.ENOSPC, errno.EDQUOT)


class DiskTier:
    """Bytes on one drive or several (striped), behind an account. The files go when the tier does: at ``close``, when it
    is dropped, at exit.

    The files grow in steps of ``growth_bytes`` and never past the budget; growing allocates the blocks on the drive, so a
    full drive is an error here (ENOSPC, nothing lost), not in the middle of a write.
    """

    name: TierName = "disk"

    def __init__(
        self,
        directories: Sequence[str | Path],
        budget_bytes: int | None = None,
        *,
        rank: int = 0,
        engine: DiskEngine | None = None,
        growth_bytes: int = GROWTH_BYTES,
    ) -> None:
        if isinstance(directories, str) or not directories:
            raise ValueError(f"the disk tier needs a list of one directory or more, got {directories!r}")
        self.ledger = Ledger("disk", budget_bytes)
        self._lock = threading.Lock()
        self._free = FreeList()
        self._lost: deque[tuple[tuple[Extent, ...], list[NativeTicket]]] = deque()
        self._used_bytes = 0  # beyond this nothing was ever written: it reads as zeros
        self._growth_bytes = align_up(growth_bytes, STRIPE_BYTES * len(directories))
        self.removed: list[Path] = []
        """Files of dead processes that were found and removed."""
        claims: list[Claim] = []
        self.engine = DiskEngine() if engine is None else engine
        owned_engine = self.engine if engine is None else None
        try:
            for directory in directories:
                owned, removed = claim(Path(directory), rank)
                claims.append(owned)
                self.removed += removed
            self.paths = [owned.path for owned in claims]
            self._file = self.engine.open(
                self.paths, stripe_bytes=STRIPE_BYTES, create=False, descriptors=[owned.descriptor for owned in claims]
            )
        except BaseException:
            _shut(None, owned_engine, claims)
            raise
        self._claims = claims
        self._can_clone = True  # until the file system says otherwise
        self._shut = Gone(self, _shut, self._file, owned_engine, claims)

    def allocate(self, nbytes: int, label: str = "") -> DiskBlock:
        check_size(nbytes, self.name)
        if not self._shut.alive:
            raise RuntimeError("this disk tier is closed")
        block = DiskBlock(self.ledger, nbytes, label, ())
        block.lost = self._lost
        self.ledger.charge(block, align_up(nbytes), label)
        try:
            try:
                self._take(block)
            except OSError as error:
                if error.errno not in _FULL or not self.ledger.reclaim():
                    raise
                self._take(block)
        except BaseException:
            self.ledger.discharge(block)
            raise
        return block

    def _take(self, block: DiskBlock) -> None:
        self._find_lost()
        with self._lock:
            self._grow(self._free.shortage(block.nbytes), block.label)
            block.extents = self._free.take(block.nbytes)
            self._used_bytes = max(self._used_bytes, *(extent.end for extent in block.extents))

    def _find_lost(self) -> None:
        """The extents of blocks that were dropped without being freed can be used again."""
        while self._lost:
            extents, in_flight = self._lost[0]
            _outwait(in_flight)
            with self._lock:
                self._lost.popleft()
                self._free.give_back(extents)

    def zeros(self, nbytes: int, label: str = "") -> DiskBlock:
        """A block that reads as zeros. Space that was never handed out does already; the rest is written."""
        with self._lock:
            used = self._used_bytes
        block = self.allocate(nbytes, label)
        start, tickets = 0, []
        memory: HostMemory | None = None
        for extent in block.extents:
            for position in range(0, max(0, min(extent.nbytes, used - extent.offset)), _ZERO_BYTES):
                memory = HostMemory(_ZERO_BYTES) if memory is None else memory
                length = min(_ZERO_BYTES, extent.nbytes - position)
                tickets += self.write(block, start + position, memory.address, length, keep=memory)
            start += extent.nbytes
        try:
            for ticket in tickets:
                ticket.wait()
        except BaseException:
            self.free(block)
            raise
        return block

    def free(self, block: Block) -> None:
        """Waits for requests on the block that are still in flight: its place must not be handed out under them."""
        block.check_live()
        if isinstance(block, DiskBlock):
            with self._lock:
                in_flight = list(block.in_flight)
            _outwait(in_flight)  # first: an interrupted free is none
        with self._lock:
            block.mark_freed(self.ledger)
            assert isinstance(block, DiskBlock)
            self._free.give_back(block.extents)
        self.ledger.discharge(block)

    def read(
        self,
        block: DiskBlock,
        offset: int,
        address: int,
        nbytes: int,
        keep: object = None,
        after: Sequence[NativeTicket] = (),
    ) -> list[NativeTicket]:
        """Reads into memory at ``address``, which has room for ``nbytes`` rounded up to the alignment. ``keep`` owns it."""
        return self._submit("read", block, offset, address, nbytes, keep, after)

    def write(
        self,
        block: DiskBlock,
        offset: int,
        address: int,
        nbytes: int,
        keep: object = None,
        after: Sequence[NativeTicket] = (),
    ) -> list[NativeTicket]:
        """Writes from memory at ``address``, which is readable for ``nbytes`` rounded up to the alignment."""
        return self._submit("write", block, offset, address, nbytes, keep, after)

    def clone(self, blocks: Sequence[DiskBlock], beside_bytes: int = 0) -> DiskClone | None:
        """What is in these blocks now, whatever is written to them later. None where the file system cannot do that, or where
        there is no room for what it takes beside ``beside_bytes`` that the caller needs. See [Note: clones] in tiers/clone.py.
        """
        nbytes = sum(align_up(block.nbytes) for block in blocks)
        if not blocks or not self._can_clone or nbytes + beside_bytes > self._spare_bytes(0):
            return None  # what is free inside of the tier's files is of no use: the file system puts things elsewhere
        with self._lock:
            in_flight = [ticket for block in blocks for ticket in block.in_flight]
        _outwait(in_flight)
        extents = [extent for block in blocks for extent in block.extents]
        try:
            descriptors = [owned.descriptor for owned in self._claims]
            made = share(self.ledger, descriptors, self.paths, STRIPE_BYTES, extents)
        except (OSError, NativeError) as error:
            self._can_clone = not (isinstance(error, OSError) and error.errno in CANNOT)
            return None
        try:
            self.ledger.charge(made, nbytes, "a snapshot of states")
        except BudgetError:
            made.close()
            return None
        return made

    def spare_bytes(self) -> int:
        """What could be held beyond what is needed: what the budget leaves, and at most half of what the drives have free."""
        with self._lock:
            inside = self._free.free_bytes
        return self._spare_bytes(inside)

    def _spare_bytes(self, inside_bytes: int) -> int:
        """The same, where so much is free inside of the files."""
        on_drives: int = min(shutil.disk_usage(path.parent).free for path in self.paths) * len(self.paths)
        free = inside_bytes + on_drives // local_ranks()
        left = self.ledger.free_bytes
        return free // 2 if left is None else min(left, free // 2)

    def close(self) -> None:
        """Finishes requests in flight, closes and removes the files. Blocks become useless. A second call does nothing."""
        self._shut()

    def _submit(
        self,
        op: Operation,
        block: DiskBlock,
        offset: int,
        address: int,
        nbytes: int,
        keep: object,
        after: Sequence[NativeTicket],
    ) -> list[NativeTicket]:
        submit = self._file.read if op == "read" else self._file.write
        tickets = []
        for extent, position in block.pieces(offset, align_up(nbytes)):
            ticket = submit(extent.offset, address + position, extent.nbytes, after, keep=(keep, *after))
            tickets.append(ticket)
            with self._lock:
                block.in_flight.add(ticket)
        return tickets

    def _grow(self, shortage_bytes: int, label: str) -> None:
        if shortage_bytes == 0:
            return
        size = self._free.size_bytes
        step = align_up(shortage_bytes, self._growth_bytes)
        if self.ledger.budget_bytes is not None:
            within_budget = (self.ledger.budget_bytes - size) // ALIGNMENT * ALIGNMENT
            step = max(shortage_bytes, min(step, within_budget))
        for attempt in (step, shortage_bytes):  # the drive may have room for what is needed, but not for a whole step
            try:
                self._file.resize(size + attempt)
            except OSError as error:
                if error.errno in _FULL and attempt > shortage_bytes:
                    continue
                where = ", ".join(str(path.parent) for path in self.paths)
                error.add_note(f"{label or 'a block'} needs {format_bytes(shortage_bytes)} more on disk in {where}")
                raise
            self._free.grow(attempt)
            return


def _outwait(in_flight: list[NativeTicket]) -> None:
    for ticket in in_flight:
        with contextlib.suppress(Exception):  # who asked for it gets the error from the ticket
            ticket.wait()


def named(error: DiskError, what: str) -> DiskError:
    """The same failure, saying what was being done (and so whose bytes they are)."""
    return DiskError(error.errno or 0, f"{what} failed: {error.reason}", str(error.filename), error.offset, error.length)


def _shut(file: DiskFile | None, owned_engine: DiskEngine | None, claims: list[Claim]) -> None:
    """What closing a tier means. Knows no tier, so that it can run when the tier is gone."""
    if owned_engine is not None:
        owned_engine.close()
    elif file is not None:
        with contextlib.suppress(NativeError):  # the engine is closed and its files with it, or it is the parent's
            file.close()
    for owned in claims:
        owned.release()
