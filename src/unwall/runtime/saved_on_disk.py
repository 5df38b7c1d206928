"""Activations that wait for backward on disk.

[Note: through a window]
They go the way of [Note: there and back] in saved_on_host.py, and on from the host: once a storage is in host memory it is
written to disk, and then its host memory serves the next one. So all of them together take ``WINDOW_BYTES`` of the host. In
backward the disk reads ahead into the same memory. When it is full forward waits for the oldest write, and backward gives up
what was read ahead last.

Of each size one block stays on the host (``Shelf.spare``), whatever else asks for memory: what is on disk can always come back.
A storage that the disk cannot take (it is full, or it fails) stays in host memory; one that it cannot give back is an error in
backward.
"""

import contextlib
import warnings
import weakref
from collections import deque
from collections.abc import Callable

import torch

from unwall.runtime.moved import Done, Moved
from unwall.runtime.saved_on_host import SavedOnHost
from unwall.tiers.block import Region
from unwall.tiers.device import DeviceTier
from unwall.tiers.host import HostBlock, HostTier
from unwall.tiers.ledger import BudgetError
from unwall.tiers.links import Links

WINDOW_BYTES = 1 << 30


class SavedOnDisk(SavedOnHost):
    """The layer. See [Note: through a window]."""

    _failed = False

    def __init__(self, links: Links, host: HostTier, device: DeviceTier, stays: Callable[[torch.Tensor], bool]) -> None:
        super().__init__(links, host, device, stays)
        known = self._by_number
        self._shelf.most_bytes = WINDOW_BYTES
        self._shelf.spare = lambda nbytes: any(m.on_disk is not None and m.nbytes == nbytes for m in list(known.values()))
        self._waiting: deque[weakref.ref[Moved]] = deque()
        """On the host or on their way there, to be written."""
        self._writing: deque[weakref.ref[Moved]] = deque()
        self._read: list[weakref.ref[Moved]] = []
        """Read ahead, not used yet."""

    # -- to the disk --------------------------------------------------------------------------------------------------

    def _take(self, nbytes: int) -> "tuple[HostBlock, Done] | None":
        """Where the window is full: after the oldest write. None where the host has no room at all."""
        self._go_on()
        while True:
            taken = self._shelf.take(nbytes)
            if taken is not None:
                return taken
            if not (self._wait_for_write() or self._give_up_a_read()):
                break
        self._shelf.clear()  # blocks of other sizes fill the window
        taken = self._shelf.take(nbytes)
        if taken is None and self._shelf.most_bytes is not None:
            self._shelf.most_bytes += nbytes  # one storage is larger than the window
            taken = self._shelf.take(nbytes)
        return taken

    def _sent(self, moved: Moved) -> None:
        if not self._failed:
            self._waiting.append(weakref.ref(moved))
        self._go_on()

    def _go_on(self) -> None:
        """Writes what has reached the host, and gives back the memory of what was written."""
        while self._waiting:
            moved = self._waiting[0]()
            if moved is not None and moved.leaving.done is not None and not moved.leaving.done.query():
                break
            self._waiting.popleft()
            if moved is not None:
                self._write(moved)
        while self._writing:
            moved = self._writing[0]()
            if moved is not None and moved.ticket is not None and not moved.ticket.done():
                break
            self._writing.popleft()
            if moved is not None:
                self._written(moved)

    def _wait_for_write(self) -> bool:
        """For the oldest one. False: there is none."""
        if not self._writing and self._waiting:
            moved = self._waiting.popleft()()
            if moved is not None:
                if moved.leaving.done is not None:
                    moved.leaving.done.synchronize()
                self._write(moved)
            return True
        if not self._writing:
            return False
        moved = self._writing.popleft()()
        if moved is not None:
            self._written(moved)
        return True

    def _write(self, moved: Moved) -> None:
        disk = self._links.disk
        if disk is None or moved.block is None or self._failed:
            return
        try:
            moved.on_disk = disk.allocate(moved.nbytes, "activations")
            moved.ticket = self._links.copy(moved.block, moved.on_disk, "activations")
        except (BudgetError, OSError) as error:
            self._stay(moved, error)
        else:
            self._writing.append(weakref.ref(moved))

    def _written(self, moved: Moved) -> None:
        """Its memory on the host is free, unless the disk has failed."""
        ticket, moved.ticket = moved.ticket, None
        if ticket is None:
            return
        try:
            ticket.wait()
        except OSError as error:
            self._stay(moved, error)
        else:
            moved.give_back()

    def _stay(self, moved: Moved, error: BaseException) -> None:
        moved.on_disk = None
        if not self._failed:
            self._failed = True
            self._shelf.most_bytes = None
            warnings.warn(f"activations stay in host memory from now on: {error}", RuntimeWarning, stacklevel=2)

    # -- back ---------------------------------------------------------------------------------------------------------

    def _fetch(self, moved: Moved) -> None:
        if moved.back is not None:
            return
        if moved.block is None:
            self._begin_read(moved, self._take(moved.nbytes))
        if moved.ticket is not None and moved.on_disk is not None and weakref.ref(moved) in self._read:
            self._wait_for_read(moved)
            self._read.remove(weakref.ref(moved))
        super()._fetch(moved)
        if moved.on_disk is not None and moved.ticket is None:
            moved.give_back()

    def _fetch_ahead(self, number: int) -> None:
        """The disk reads ahead as far as the window allows; what it has read goes on to the device."""
        self._go_on()
        ahead = 0
        for earlier in range(number - 1, 0, -1):
            moved = self._by_number.get(earlier)
            if moved is None:
                return
            if moved.uses <= 0 or moved.leaving.tensor is not None:
                continue
            if moved.block is None and moved.back is None:
                taken = self._shelf.take(moved.nbytes)
                if taken is None:
                    return
                self._begin_read(moved, taken)
            ahead += moved.nbytes
            is_read = moved.ticket is None or moved.ticket.done()
            if moved.back is None and ahead <= self._ahead_bytes and is_read and not self._fetches(moved):
                return

    def _begin_read(self, moved: Moved, taken: "tuple[HostBlock, Done] | None") -> None:
        if taken is None or moved.on_disk is None:
            raise RuntimeError(
                f"activations of {moved.nbytes} bytes cannot come back from disk: the host has no memory for them"
            )
        block, done = taken
        if done is not None:
            done.synchronize()  # the disk writes into it: a copy to the device must have ended
        moved.block = block
        moved.ticket = self._links.copy(Region.whole(moved.on_disk), Region.whole(block), "activations")
        self._read.append(weakref.ref(moved))

    def _give_up_a_read(self) -> bool:
        """The one that is needed last. False: there is none."""
        while self._read:
            moved = self._read.pop()()
            if moved is not None and moved.ticket is not None:
                with contextlib.suppress(OSError):  # it is read again when it is needed
                    self._wait_for_read(moved)
                moved.give_back()
                return True
        return False

    def _wait_for_read(self, moved: Moved) -> None:
        """What could not be read is not there: the next one who needs it reads again."""
        assert moved.ticket is not None
        try:
            moved.ticket.wait()
        except OSError:
            moved.ticket = None
            moved.give_back()
            raise
        moved.ticket = None
