"""Page-locked host memory that is lent for a while, again and again: for bytes that go through the host and do not stay."""

from collections import deque
from collections.abc import Callable
from weakref import WeakMethod

from unwall.tiers.host import HostBlock, HostTier
from unwall.tiers.ticket import Ticket


class Loans:
    """Blocks of ``nbytes``, or more where more is asked for. When ``most`` of them are out, whoever wants another one waits for
    the work that uses the one given back first. Where none was given back, those who hold them are asked (``short``); after
    that there is another one, as far as the host has room, until one comes back."""

    def __init__(self, host: HostTier, nbytes: int, most: int) -> None:
        self.short: WeakMethod[Callable[[], None]] | None = None
        """Told when all are out: it has some given back, if it can."""
        self._host = host
        self._nbytes = nbytes
        self._most = most
        self._made = 0
        self._free: list[HostBlock] = []
        self._used: deque[tuple[HostBlock, list[Ticket]]] = deque()
        """Given back, and what works on them yet."""

    def take(self, nbytes: int, label: str) -> HostBlock:
        """A block of at least ``nbytes``. Raises what the work failed with that was waited for: call it again."""
        while True:
            self._collect()
            for block in self._free:
                if block.nbytes >= nbytes:
                    self._free.remove(block)
                    block.label = label
                    return block
            if self._made < self._most or not self._comes_back():
                block = self._host.allocate(max(nbytes, self._nbytes), label, pinned=True)
                self._made += 1
                return block
            for ticket in self._used[0][1]:
                ticket.wait()
            self._drop_free()  # they are too small

    def give_back(self, block: HostBlock, after: list[Ticket]) -> None:
        """The block may be lent again when the work ``after`` which it is free has ended."""
        self._used.append((block, after))

    def close(self) -> None:
        """Gives back to the host what nobody uses."""
        self._collect()
        self._drop_free()

    def _comes_back(self) -> bool:
        short = None if self._used or self.short is None else self.short()
        if short is not None:
            short()
        return bool(self._used)

    def _collect(self) -> None:
        while self._used and all(ticket.done() for ticket in self._used[0][1]):
            for ticket in self._used[0][1]:
                ticket.wait()  # raises what it failed with: then it is not free
            self._free.append(self._used.popleft()[0])
            if self._made > self._most:
                self._drop_free()

    def _drop_free(self) -> None:
        while self._free:
            self._host.free(self._free.pop())
            self._made -= 1
