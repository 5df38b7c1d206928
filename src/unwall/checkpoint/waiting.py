"""Where new values wait until everything is verified.

[Note: once]
Nothing of a model is changed before all that it will take is known to be whole. States whose old values are not lost by it are
read once, and verified on the way. There are two kinds. The states of an optimizer that has not stepped all have their first
value: they are read into their places, and set back to it if anything is found on any rank. What else there is room for gets a
second place: on the host and on disk the new block takes the old one's place in the end, as a shadow does (optim/shadows.py),
on the device it is copied. The room is what shadows might take, too: what the budget leaves, or all but a fifth of the host's
memory, half of what the drive has free. Everything else is read twice: see [Note: twice] in reader.py.

Where the system hands out fresh memory more slowly than a drive reads (some virtual machines get it from their host page by
page), reading twice is faster. So the first second place on the host is touched at once, and timed: ``Room``.
"""

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch

from unwall.checkpoint.goals import Goal
from unwall.checkpoint.lots import Held
from unwall.shards.store import Store
from unwall.tiers.block import Block, MemoryBlock
from unwall.tiers.host import HostBlock, spare_bytes
from unwall.tiers.ledger import BudgetError, TierName
from unwall.tiers.tiers import Tiers


@dataclass(frozen=True)
class Home:
    """Where a state of a group lives."""

    held: Held
    numel: int
    store: Store | None
    """None: in the flat buffer."""

    @staticmethod
    def of(store: Store) -> "Home":
        return Home(Held.of(store), store.numel, store)

    @property
    def nbytes(self) -> int:
        return self.numel * self.held.dtype.itemsize


SLOW_MEMORY = 2e9
"""Bytes per second: memory that comes more slowly is not worth it."""
TIMED_BYTES = 16 << 20
"""The least that tells how fast memory comes."""


class Spare:
    """A second place for a state."""

    def __init__(self, home: Home, tiers: Tiers, touch: bool) -> None:
        self._home = home
        self._tiers = tiers
        self.block = _allocate(tiers, home, touch)

    @property
    def held(self) -> Held:
        return Held(self.block, self._home.held.dtype, 0)

    def install(self) -> None:
        """Its values become the state."""
        home, old = self._home, self._home.held.block
        if home.store is not None and _exchangeable(old):
            self._tiers.free(home.store.exchange(self.block))
            return
        assert isinstance(old, MemoryBlock)
        assert isinstance(self.block, MemoryBlock)
        with torch.no_grad():
            old.view(home.held.dtype)[home.held.start :][: home.numel].copy_(self.block.view(home.held.dtype)[: home.numel])
        self.free()

    def free(self) -> None:
        self._tiers.free(self.block)


@dataclass
class Waiting:
    """A goal that is reached as far as it can be undone."""

    goal: Goal
    spares: list[Spare] | None
    """Where it is read to. None: into its place, which has its first value everywhere."""

    def install(self) -> None:
        while self.spares:
            self.spares.pop().install()

    def forgo(self) -> None:
        """It will not be read once: nothing was read yet."""
        while self.spares:
            self.spares.pop().free()

    def undo(self) -> None:
        """The state is as it was. Raises the first error, after everything else has been set back."""
        self.forgo()
        if self.spares is not None:
            return
        if self.goal.place is not None:
            self.goal.place.fill_(self.goal.otherwise)
            return
        failure: Exception | None = None
        for low, values in _first_values(self.goal):
            try:
                self.goal.put(low, values)
            except Exception as error:
                failure = failure or error
        if failure is not None:
            raise failure


class Room:
    """What the tiers have to spare."""

    def __init__(self, tiers: Tiers) -> None:
        self._tiers = tiers
        self._left: dict[TierName, int] = {}
        self._timed = False

    def spares(self, homes: Iterable[Home]) -> list[Spare] | None:
        """Second places. None where there is no room for all of them."""
        homes, found = list(homes), []
        if not all(self._has(home) for home in homes):
            return None
        try:
            for home in homes:
                found.append(self._spare(home))
        except (BudgetError, MemoryError, RuntimeError, OSError):
            for spare in found:
                spare.free()
            return None
        return found

    def _spare(self, home: Home) -> Spare:
        if self._timed or home.held.block.tier != "host" or home.nbytes < TIMED_BYTES:
            return Spare(home, self._tiers, touch=False)
        start, spent = time.perf_counter(), time.process_time()
        found = Spare(home, self._tiers, touch=True)
        self._timed = True
        pool = self._tiers.host.pool
        # Other programs that keep the processors busy make reading slower as well: the time that was worked counts then.
        worked = (time.process_time() - spent) / (1 if pool is None else pool.threads)
        if home.nbytes / max(min(time.perf_counter() - start, worked), 1e-9) < SLOW_MEMORY:
            self._left["host"] = 0
        return found

    def _has(self, home: Home) -> bool:
        tier, where = home.held.block.tier, self._tiers
        pots: list[TierName] = ["device", "host"] if tier == "device" and where.device.device.type == "cpu" else [tier]
        for pot in pots:
            if pot not in self._left:
                self._left[pot] = _spare_bytes(where, pot)
            self._left[pot] -= home.nbytes
        return all(self._left[pot] >= 0 for pot in pots)


def _spare_bytes(tiers: Tiers, tier: TierName) -> int:
    if tier == "host":
        return spare_bytes(tiers.host.ledger)
    if tier == "disk":
        return 0 if tiers.disk is None else tiers.disk.spare_bytes()
    device = tiers.device.device
    free = torch.cuda.mem_get_info(device)[0] // 2 if device.type == "cuda" else spare_bytes(tiers.host.ledger)
    left = tiers.device.ledger.free_bytes
    return free if left is None else min(free, left)


def _exchangeable(block: Block) -> bool:
    """Page-locking takes longer than a copy, and of the device's memory others may have views."""
    return block.tier == "disk" or (isinstance(block, HostBlock) and not block.pinned)


def _allocate(tiers: Tiers, home: Home, touch: bool) -> Block:
    label = f"new {home.held.block.label}"
    if home.held.block.tier == "disk":
        assert tiers.disk is not None
        return tiers.disk.allocate(home.nbytes, label)
    if home.held.block.tier == "host":
        return tiers.host.allocate(home.nbytes, label, touch=touch)  # otherwise whoever reads does that
    return tiers.device.allocate(home.nbytes, label)


def _first_values(goal: Goal) -> Iterator[tuple[int, torch.Tensor]]:
    numel, size = goal.group.own_numel, 1 << 20
    values = torch.full((min(size, numel),), goal.otherwise, dtype=goal.dtype)
    for low in range(0, numel, size):
        yield low, values[: min(size, numel - low)]
