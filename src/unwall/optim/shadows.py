"""Second places for the states of groups, where an update ahead of ``step`` writes. See [Note: speculation] in optim/early.py.

[Note: which groups get a shadow]
In host memory, as many as it has room for, the first groups of the model before others: the next forward needs them first,
and has no time to wait for their update. On disk the update itself is slow, and what counts is that the drive does not rest
while backward computes. So there a shadow goes to whatever gradient lands while fewer than ``DISK_AHEAD`` such updates are
under way; committed, its old extents are the next shadow. There are never more of them than one backward can use.

[Note: no journal on disk]
An update into fresh extents reads and writes what one in place does: of a model that is all on disk 14 and 12 bytes per
parameter (measured: 16 and 14 per step, with the fetches and the gradients, whether it runs ahead or not), and a commit moves
nothing. In place with a journal (optim/journaled.py) the same bytes go to the drive, and 2.1 more have to be kept; after a miss
either way does them all again. So a journal would save room on the drive alone, 12 bytes per parameter of what is ahead, where
room is cheap; and a write that fails half way would leave states that only the journal can mend.

[Note: taken]
The thread that trains takes shadows, the thread that updates may give them back (memory is reclaimed where it is missing). So a
shadow is chosen and taken under a lock, and given back only while nobody has it. A new one is made outside of that lock,
because its own memory may have to be reclaimed, and is known to others only when it is taken.
"""

import threading
import weakref
from collections.abc import Iterable

import torch

from unwall.optim.lending import Lendable, take_idle
from unwall.runtime.engine import Engine
from unwall.shards.group import Group
from unwall.shards.states import StateKey
from unwall.shards.store import Store
from unwall.tiers.block import Block, MemoryBlock
from unwall.tiers.host import spare_bytes
from unwall.tiers.ledger import BudgetError
from unwall.tiers.tiers import Tiers

DISK_AHEAD = 3
"""Updates through the disk ahead of ``step`` that are under way at once: the last writes of one, the reads of another, and the
next one is ready when one ends."""


class Shadow(Lendable):
    """A second place for every state of one group, each on the tier where the state lives. Keeps no tier and no model alive.

    It is taken from the start: whoever makes it lends it to a user.
    """

    def __init__(self, stores: dict[StateKey, Store], tiers: Tiers) -> None:
        super().__init__()
        self._tiers = weakref.ref(tiers)
        self.blocks: dict[StateKey, Block] = {}
        try:
            for name, store in stores.items():
                label = f"shadow of the {store.label}"
                if store.on_disk:
                    assert tiers.disk is not None
                    self.blocks[name] = tiers.disk.zeros(store.nbytes, label)
                else:
                    self.blocks[name] = tiers.host.allocate(store.nbytes, label, pinned=store.pinned)
        except BaseException:
            self.free()
            raise

    def held(self) -> Iterable[Block]:
        return self.blocks.values()

    def fits(self, stores: dict[StateKey, Store]) -> bool:
        """Whether these states can be swapped with what is here."""
        return {name: (block.tier, block.nbytes) for name, block in self.blocks.items()} == {
            name: (store.tier, store.nbytes) for name, store in stores.items()
        }

    def tensors(self, stores: dict[StateKey, Store]) -> dict[StateKey, torch.Tensor]:
        """Those in memory."""
        return {name: block.view(stores[name].dtype) for name, block in self.blocks.items() if isinstance(block, MemoryBlock)}

    def swap(self, stores: dict[StateKey, Store]) -> None:
        """The shadow becomes the state, the state the shadow."""
        for name, store in stores.items():
            self.blocks[name] = store.exchange(self.blocks[name])

    def free(self) -> None:
        tiers = self._tiers()
        for block in self.blocks.values():
            if tiers is not None:
                tiers.free(block)
        self.blocks.clear()


class Shadows:
    """The shadows of one optimizer. See [Note: which groups get a shadow] and [Note: taken]."""

    def __init__(self) -> None:
        self._of_groups: weakref.WeakKeyDictionary[Group, Shadow] = weakref.WeakKeyDictionary()
        self._chosen: weakref.WeakKeyDictionary[Engine, set[int]] = weakref.WeakKeyDictionary()
        self._on_disk: weakref.WeakKeyDictionary[Engine, list[Shadow]] = weakref.WeakKeyDictionary()
        self._lock = threading.Lock()  # nobody waits or allocates under it

    def choose(self, engine: Engine, indices: set[int]) -> None:
        """The groups that may have one, where another decision than ``choose_shadowed`` is taken."""
        self._chosen[engine] = indices

    def of_group(self, engine: Engine, group: Group, stores: dict[StateKey, Store]) -> Shadow | None:
        """Takes the shadow of a group that lives in host memory, if it has one and it is not in use."""
        if engine not in self._chosen:
            self._chosen[engine] = choose_shadowed(engine)
        with self._lock:
            found = self._of_groups.get(group)
            if found is not None:
                return take_idle([found])
        if group.index not in self._chosen[engine]:
            return None
        made = _shadow(stores, engine.tiers)
        if made is None:  # someone else took the memory, or it cannot be page-locked
            self._chosen[engine].discard(group.index)
            return None
        with self._lock:
            self._of_groups[group] = made
        return made

    def on_disk(self, engine: Engine, stores: dict[StateKey, Store]) -> Shadow | None:
        """Takes a shadow for a group with states on disk that is not in use, if there is room for one."""
        with self._lock:
            pool = self._on_disk.setdefault(engine, [])
            found = take_idle([shadow for shadow in pool if shadow.fits(stores)])
        if found is not None:
            return found
        made = _shadow(stores, engine.tiers)
        if made is not None:
            with self._lock:
                pool.append(made)
        return made

    def reclaim(self, wait: bool, engine: Engine | None = None) -> None:
        """Gives back all that can be, or all of one engine's. ``wait``: also those in use now, when that has ended."""
        with self._lock:
            known = self._all(engine)
        for shadow in known if wait else []:
            shadow.stop_user()
        with self._lock:
            idle = [shadow for shadow in self._all(engine) if shadow.idle]
            for group in [group for group, shadow in self._of_groups.items() if shadow in idle]:
                del self._of_groups[group]
            for pool in self._on_disk.values():
                pool[:] = [shadow for shadow in pool if shadow not in idle]
        for shadow in idle:
            shadow.free()

    def leave(self, engine: Engine) -> None:
        """The states of an engine will live elsewhere, and others of them may get a shadow there."""
        self.reclaim(wait=True, engine=engine)
        self._chosen.pop(engine, None)

    def free(self, engine: Engine) -> None:
        """The optimizer is gone: gives all of an engine's back. One whose commit waits behind a failed update goes later."""
        self.reclaim(wait=True, engine=engine)
        if self._all(engine):
            engine.discarded.append(self.free)

    def _all(self, engine: Engine | None) -> list[Shadow]:
        of_groups = [shadow for group, shadow in self._of_groups.items() if engine is None or group in engine.groups]
        on_disk = [pool for owner, pool in self._on_disk.items() if engine is None or owner is engine]
        return [*of_groups, *(shadow for pool in on_disk for shadow in pool)]


def _shadow(stores: dict[StateKey, Store], tiers: Tiers) -> Shadow | None:
    """A new shadow, where there is room to spare for one."""
    sizes = {True: 0, False: 0}
    for store in stores.values():
        sizes[store.on_disk] += store.nbytes
    try:
        if sizes[True] and (tiers.disk is None or sizes[True] > tiers.disk.spare_bytes()):
            return None
        return None if sizes[False] > spare_bytes(tiers.host.ledger) else Shadow(stores, tiers)
    except (BudgetError, MemoryError, RuntimeError, OSError):
        return None


def choose_shadowed(engine: Engine) -> set[int]:
    """The groups in host memory that get a shadow. See [Note: which groups get a shadow]."""
    left = spare_bytes(engine.tiers.host.ledger)
    chosen = set()
    for index, needed in shadow_sizes(engine).items():
        if needed > left:
            break
        chosen.add(index)
        left -= needed
    return chosen


def shadow_sizes(engine: Engine) -> dict[int, int]:
    """What a shadow of each group that lives in host memory takes, in the order of the model."""
    found = {}
    for group in engine.groups:
        if group.home.tier == "host" and not group.home.on_disk and group.param is not None:
            found[group.index] = group.param.nbytes + sum(store.nbytes for store in group.states.values())
    return found
