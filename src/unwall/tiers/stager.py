"""Copies that neither end can do alone: through the host, chunk by chunk.

[Note: device and disk]
Disk and device never meet directly: bytes go through the slots of a bounce ring. While one chunk takes its second hop, the
first hops of the next ones are under way. Each direction has a thread and a ring of its own: with a shared ring, slots that
wait for a slow read would hold up every write.
"""

from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass

from unwall.native.at_exit import say_if_ended
from unwall.tiers.block import Region
from unwall.tiers.host import HostBlock
from unwall.tiers.ring import BounceRing
from unwall.tiers.ticket import FutureTicket, Ticket

Hop = Callable[[Region, Region], Ticket]
"""Starts a direct copy, of which one end is a slot."""


@dataclass(frozen=True)
class _Chunk:
    """Bytes on their way: the ticket of the first hop, the slot that it fills, and where the second hop goes."""

    slot: HostBlock
    first: Ticket
    target: Region


class Stager:
    """Copies of one direction, one after the other. See [Note: device and disk]."""

    def __init__(self, name: str, ring: BounceRing) -> None:
        self.ring = ring
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"unwall {name}")

    def copy(self, source: Region, target: Region, hop: Hop) -> Ticket:
        try:
            return FutureTicket(self._thread.submit(self._run, source, target, hop))
        except RuntimeError as error:
            say_if_ended(error)
            raise

    def close(self) -> None:
        """Finishes what was submitted, stops the thread and frees the ring."""
        self._thread.shutdown(wait=True)
        self.ring.close()

    def _run(self, source: Region, target: Region, hop: Hop) -> None:
        pending: deque[_Chunk] = deque()
        try:
            for position in range(0, source.nbytes, self.ring.slot_bytes):
                nbytes = min(self.ring.slot_bytes, source.nbytes - position)
                if self.ring.full():
                    self._finish_oldest(pending, hop)
                slot = self.ring.acquire()
                try:
                    first = hop(source.part(position, nbytes), Region(slot, 0, nbytes))
                    pending.append(_Chunk(slot, first, target.part(position, nbytes)))
                except BaseException:
                    self.ring.release(slot)
                    raise
            while pending:
                self._finish_oldest(pending, hop)
        finally:
            for chunk in pending:  # only after a failure: nothing may still use a slot that is given back
                with suppress(Exception):  # the first failure is already on its way up
                    chunk.first.wait()
                self.ring.release(chunk.slot)

    def _finish_oldest(self, pending: deque[_Chunk], hop: Hop) -> None:
        chunk = pending.popleft()
        try:
            chunk.first.wait()
            hop(Region(chunk.slot, 0, chunk.target.nbytes), chunk.target).wait()
        finally:
            self.ring.release(chunk.slot)
