"""Second places for the states of groups, where an update ahead of ``step`` writes. See [Note: speculation] in optim/early.py.

[Note: which groups get a shadow]
In host memory, as many as it has room for, the first groups of the model before others: the next forward needs them first,
and has no time to wait for their update. On disk the update itself is slow, and what counts is that the drive does not rest
while backward computes. So there a shadow goes to whatever gradient lands while fewer than ``DISK_AHEAD`` such updates are
under way; committed, its old extents are the next shadow. There are never more of them than one backward can use.
"""

import weakref
from collections.abc import Collection
from contextlib import suppress

import torch

from unwall.optim.updates import HostUpdate
from unwall.runtime.engine import Engine
from unwall.shards.group import Group
from unwall.shards.store import Store
from unwall.tiers.block import Block, MemoryBlock
from unwall.tiers.host import spare_bytes
from unwall.tiers.ledger import BudgetError
from unwall.tiers.tiers import Tiers

DISK_AHEAD = 2
"""Updates through the disk ahead of ``step`` that are under way at once: the next one is ready when one ends."""


class Shadow:
    """A second place for every state of one group, each on the tier where the state lives. Keeps no tier and no model alive."""

    def __init__(self, stores: dict[str, Store], tiers: Tiers) -> None:
        self._tiers = weakref.ref(tiers)
        self.blocks: dict[str, Block] = {}
        self._user: weakref.ref[HostUpdate] | None = None
        try:
            for name, store in stores.items():
                label = f"shadow of the {store.label}"
                if store.on_disk:
                    assert tiers.disk is not None
                    self.blocks[name] = tiers.disk.zeros(store.block.nbytes, label)
                else:
                    self.blocks[name] = tiers.host.allocate(store.block.nbytes, label, pinned=store.pinned)
        except BaseException:
            self.free()
            raise

    @property
    def user(self) -> HostUpdate | None:
        """The work that writes here or commits what is here. None, or done: it can be used for another group."""
        return None if self._user is None else self._user()  # gone: the queue has run it

    @user.setter
    def user(self, update: HostUpdate) -> None:
        self._user = weakref.ref(update)

    @property
    def idle(self) -> bool:
        return self.user is None or self.user.done()

    def fits(self, stores: dict[str, Store]) -> bool:
        """Whether these states can be swapped with what is here."""
        return {name: (block.tier, block.nbytes) for name, block in self.blocks.items()} == {
            name: (store.block.tier, store.block.nbytes) for name, store in stores.items()
        }

    def tensors(self, stores: dict[str, Store]) -> dict[str, torch.Tensor]:
        """Those in memory."""
        return {name: block.view(stores[name].dtype) for name, block in self.blocks.items() if isinstance(block, MemoryBlock)}

    def swap(self, stores: dict[str, Store]) -> None:
        """The shadow becomes the state, the state the shadow."""
        for name, store in stores.items():
            store.block, self.blocks[name] = self.blocks[name], store.block

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

    def of_group(self, engine: Engine, group: Group, stores: dict[str, Store]) -> Shadow | None:
        """The shadow of a group that lives in host memory, if it has one."""
        if engine not in self._chosen:
            self._chosen[engine] = choose_shadowed(engine)
        if group not in self._of_groups and group.index in self._chosen[engine]:
            try:
                self._of_groups[group] = Shadow(stores, engine.tiers)
            except (BudgetError, MemoryError, RuntimeError):  # someone else took the memory, or it cannot be page-locked
                self._chosen[engine].discard(group.index)
        return self._of_groups.get(group)

    def on_disk(self, engine: Engine, stores: dict[str, Store], taken: Collection[Shadow]) -> Shadow | None:
        """A shadow for a group with states on disk that is not ``taken``, if there is room for one."""
        pool = self._on_disk.setdefault(engine, [])
        for shadow in pool:
            if shadow.idle and shadow not in taken and shadow.fits(stores):
                return shadow
        disk, host = engine.tiers.disk, engine.tiers.host
        assert disk is not None
        sizes = {True: 0, False: 0}
        for store in stores.values():
            sizes[store.on_disk] += store.block.nbytes
        if sizes[True] > disk.spare_bytes() or sizes[False] > spare_bytes(host.ledger):
            return None
        try:
            pool.append(Shadow(stores, engine.tiers))
        except (BudgetError, MemoryError, RuntimeError, OSError):
            return None
        return pool[-1]

    def reclaim(self) -> None:
        """Gives back all but those that are being committed."""
        for group, shadow in list(self._of_groups.items()):
            if group.update is None or group.update.done():
                del self._of_groups[group]
                shadow.free()
        for pool in self._on_disk.values():
            for shadow in [shadow for shadow in pool if shadow.idle]:
                pool.remove(shadow)
                shadow.free()

    def free(self) -> None:
        """Gives all of them back, when what uses them has ended."""
        for group, shadow in self._of_groups.items():
            with suppress(Exception):  # what failed was reported where it was waited for
                group.finish_update()  # it may still swap
            shadow.free()
        for shadow in [shadow for pool in self._on_disk.values() for shadow in pool]:
            with suppress(Exception):
                if shadow.user is not None:
                    shadow.user.wait()
            shadow.free()
        self._of_groups.clear()
        self._on_disk.clear()


def choose_shadowed(engine: Engine) -> set[int]:
    """The groups in host memory that get a shadow. See [Note: which groups get a shadow]."""
    left = spare_bytes(engine.tiers.host.ledger)
    chosen = set()
    for group in engine.groups:
        if group.home.tier != "host" or group.home.on_disk or group.param is None:
            continue
        needed = group.param.block.nbytes + sum(store.block.nbytes for store in group.states.values())
        if needed > left:
            break
        chosen.add(group.index)
        left -= needed
    return chosen
