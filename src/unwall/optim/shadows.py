"""Second places for the states of groups, where an update ahead of ``step`` writes. See [Note: speculation] in optim/early.py.

[Note: which groups get a shadow]
In host memory, as many as it has room for, the first groups of the model before others: the next forward needs them first,
and has no time to wait for their update. On disk the update itself is slow, and what counts is that the drive does not rest
while backward computes. So there a shadow goes to whatever gradient lands while fewer than ``DISK_AHEAD`` such updates are
under way; committed, its old extents are the next shadow. There are never more of them than one backward can use.
"""

import weakref
from collections.abc import Iterator
from contextlib import suppress
from typing import Protocol

import torch

from unwall.runtime.engine import Engine, discarded
from unwall.shards.group import Group
from unwall.shards.states import StateKey
from unwall.shards.store import Store
from unwall.tiers.block import Block, MemoryBlock
from unwall.tiers.host import spare_bytes
from unwall.tiers.ledger import BudgetError
from unwall.tiers.tiers import Tiers

DISK_AHEAD = 2
"""Updates through the disk ahead of ``step`` that are under way at once: the next one is ready when one ends."""


class User(Protocol):
    """What writes into a shadow, and commits it or does not."""

    @property
    def settled(self) -> bool:
        """It will not touch the shadow any more."""
        ...

    def stop(self) -> None:
        """Waits until it is settled, and gives up what will not be committed."""
        ...


class Shadow:
    """A second place for every state of one group, each on the tier where the state lives. Keeps no tier and no model alive."""

    def __init__(self, stores: dict[StateKey, Store], tiers: Tiers) -> None:
        self._tiers = weakref.ref(tiers)
        self.blocks: dict[StateKey, Block] = {}
        self._user: weakref.ref[User] | None = None
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

    def lend(self, user: User) -> None:
        """From now on the shadow is that user's, until it is settled or gone."""
        self._user = weakref.ref(user)

    @property
    def idle(self) -> bool:
        user = None if self._user is None else self._user()
        return user is None or user.settled

    def stop_user(self) -> None:
        """Waits for what its user has under way. How that ended is known to those who asked for it."""
        user = None if self._user is None else self._user()
        if user is not None and not user.settled:
            with suppress(Exception):
                user.stop()

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
    """The shadows of one optimizer. See [Note: which groups get a shadow]."""

    def __init__(self) -> None:
        self._of_groups: weakref.WeakKeyDictionary[Group, Shadow] = weakref.WeakKeyDictionary()
        self._chosen: weakref.WeakKeyDictionary[Engine, set[int]] = weakref.WeakKeyDictionary()
        self._on_disk: weakref.WeakKeyDictionary[Engine, list[Shadow]] = weakref.WeakKeyDictionary()

    def of_group(self, engine: Engine, group: Group, stores: dict[StateKey, Store]) -> Shadow | None:
        """The shadow of a group that lives in host memory, if it has one and it is not in use."""
        if engine not in self._chosen:
            self._chosen[engine] = choose_shadowed(engine)
        found = self._of_groups.get(group)
        if found is None and group.index in self._chosen[engine]:
            found = _shadow(stores, engine.tiers)
            if found is None:  # someone else took the memory, or it cannot be page-locked
                self._chosen[engine].discard(group.index)
            else:
                self._of_groups[group] = found
        return found if found is not None and found.idle else None

    def on_disk(self, engine: Engine, stores: dict[StateKey, Store]) -> Shadow | None:
        """A shadow for a group with states on disk that is not in use, if there is room for one."""
        pool = self._on_disk.setdefault(engine, [])
        for shadow in pool:
            if shadow.idle and shadow.fits(stores):
                return shadow
        made = _shadow(stores, engine.tiers)
        if made is not None:
            pool.append(made)
        return made

    def reclaim(self, wait: bool) -> None:
        """Gives back all that can be. ``wait``: also those that are in use now, when that has ended."""
        for shadow in list(self._all()):
            if wait:
                shadow.stop_user()
            if shadow.idle:
                shadow.free()
        for group in [group for group, shadow in self._of_groups.items() if not shadow.blocks]:
            del self._of_groups[group]
        for pool in self._on_disk.values():
            pool[:] = [shadow for shadow in pool if shadow.blocks]

    def free(self) -> None:
        """The optimizer is gone: gives all of them back. One whose commit waits behind a failed update goes later."""
        self.reclaim(wait=True)
        if any(self._all()):
            discarded.append(self.free)

    def _all(self) -> Iterator[Shadow]:
        yield from self._of_groups.values()
        for pool in self._on_disk.values():
            yield from pool


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
    for group in engine.groups:
        if group.home.tier != "host" or group.home.on_disk or group.param is None:
            continue
        needed = group.param.nbytes + sum(store.nbytes for store in group.states.values())
        if needed > left:
            break
        chosen.add(group.index)
        left -= needed
    return chosen
