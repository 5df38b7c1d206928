"""A bounded ring of host buffers through which disk and device exchange bytes."""

import threading

from unwall.tiers.host import HostBlock, HostTier
from unwall.tiers.sizes import ALIGNMENT


class BounceRing:
    """``slots`` page-locked host buffers of ``slot_bytes`` each: what its copies cost in host memory, whatever they move. Slots
    come into being at first use. One thread takes them; another one may give them back, if it was announced (``expect``)."""

    def __init__(self, host: HostTier, slots: int, slot_bytes: int) -> None:
        if slots < 2 or slot_bytes <= 0 or slot_bytes % ALIGNMENT:
            raise ValueError(f"a ring has 2 slots or more of a multiple of {ALIGNMENT} bytes, got {slots} x {slot_bytes}")
        self.slots = slots
        self.slot_bytes = slot_bytes
        self._host = host
        self._free: list[HostBlock] = []
        self._used: set[HostBlock] = set()
        self._expected = 0
        self._changed = threading.Condition()  # nothing is allocated or freed under it

    def fill(self) -> None:
        """Takes the memory of every slot now, on the calling thread, so that it cannot be missing later."""
        try:
            while len(self._free) + len(self._used) < self.slots:
                self._free.append(self._host.allocate(self.slot_bytes, "bounce ring", pinned=True))
        except BaseException:
            self.close()
            raise

    def resize(self, slot_bytes: int) -> None:
        """Slots of another size from now on, all of them taken now. Those in use are freed when they are released."""
        old, self.slot_bytes = self.slot_bytes, slot_bytes
        self.close()
        try:
            self.fill()
        except BaseException:
            self.slot_bytes = old
            raise

    @property
    def in_use(self) -> int:
        """How many slots are taken now."""
        return len(self._used)

    def full(self) -> bool:
        """True when all slots are in use."""
        return len(self._used) == self.slots

    def acquire(self) -> HostBlock:
        """A free slot. RuntimeError when the ring is full: release one first."""
        with self._changed:
            if self.full():
                raise RuntimeError(f"all {self.slots} slots of the bounce ring are in use")
            slot = self._free.pop() if self._free else None
        if slot is None:
            slot = self._host.allocate(self.slot_bytes, "bounce ring", pinned=True)
        with self._changed:
            self._used.add(slot)
        return slot

    def release(self, slot: HostBlock) -> None:
        with self._changed:
            if slot not in self._used:
                raise ValueError(f"{slot!r} is not a slot in use (released twice?)")
            self._used.remove(slot)
            kept = slot.nbytes == self.slot_bytes
            if kept:
                self._free.append(slot)
            self._changed.notify_all()
        if not kept:
            self._host.free(slot)

    def expect(self, slots: int) -> None:
        """Another thread will decide about so many slots that are in use: give them back or keep them."""
        with self._changed:
            self._expected += slots

    def decided(self) -> None:
        """By that thread, after each of them."""
        with self._changed:
            self._expected -= 1
            self._changed.notify_all()

    def await_slot(self) -> bool:
        """Whether a slot is free. Waits for one while another thread may give one back."""
        with self._changed:
            self._changed.wait_for(lambda: not self.full() or not self._expected)
            return not self.full()

    def close(self) -> None:
        """Frees the slots that are not in use."""
        while self._free:
            self._host.free(self._free.pop())
