"""Memory for journals: the way back of updates that were made in place ahead of ``step``. See [Note: journal] in
optim/journaled.py.

A journal takes a little more than two bytes per element, where a shadow takes as much as the states. It is made when its group
is first updated with one, and stays for the next step; as with shadows ([Note: taken] in optim/shadows.py), whoever needs the
memory gets it.
"""

import threading
import weakref
from collections.abc import Iterable, Sequence

from unwall.native.journal import journal_bytes
from unwall.optim.lending import Lendable, take_idle
from unwall.optim.runs import Run
from unwall.runtime.engine import Engine
from unwall.shards.group import Group
from unwall.tiers.block import Block
from unwall.tiers.host import HostBlock, spare_bytes
from unwall.tiers.ledger import BudgetError
from unwall.tiers.tiers import Tiers

_RUN_BYTES = 512
"""What each run of its own adds at most: whole lines, and a reserve for escapes."""
_CHUNK_NUMEL = 1 << 16
"""Elements that share a state, four bytes at the beginning of a run's journal."""


def group_journal_bytes(numel: int, runs: int) -> int:
    """Memory for the journal of a group that is updated in at most so many runs."""
    return journal_bytes(numel) + _RUN_BYTES * runs


class Journal(Lendable):
    """The memory of one group's journal. Keeps no tier and no model alive."""

    def __init__(self, group: Group, tiers: Tiers) -> None:
        super().__init__()
        self._tiers = weakref.ref(tiers)
        label = f"way back of updates of group {group.name}"
        self._block: HostBlock | None = tiers.host.allocate(_bytes_of(group), label)

    def held(self) -> Iterable[Block]:
        return [] if self._block is None else [self._block]

    def places(self, runs: Sequence[Run]) -> list[int]:
        """An address for each run, where nothing is noted yet."""
        assert self._block is not None
        found, at = [], 0
        for run in runs:
            numel = run.end - run.start
            self._block.data[at : at + 4 * -(-numel // _CHUNK_NUMEL)].zero_()
            found.append(self._block.address + at)
            at += -(-journal_bytes(numel) // 64) * 64
        assert at <= self._block.nbytes
        return found

    def free(self) -> None:
        tiers = self._tiers()
        if self._block is not None and tiers is not None:
            tiers.host.free(self._block)
        self._block = None


class Journals:
    """Those of one optimizer, by group."""

    def __init__(self) -> None:
        self._of_groups: weakref.WeakKeyDictionary[Group, Journal] = weakref.WeakKeyDictionary()
        self._lock = threading.Lock()  # nobody waits or allocates under it

    def of_group(self, engine: Engine, group: Group) -> Journal | None:
        """Takes the journal of a group, if it is not in use. A new one where there is room to spare."""
        with self._lock:
            found = self._of_groups.get(group)
            if found is not None:
                return take_idle([found])
        try:
            if _bytes_of(group) > spare_bytes(engine.tiers.host.ledger):
                return None
            made = Journal(group, engine.tiers)
        except (BudgetError, MemoryError, RuntimeError, OSError):
            return None
        with self._lock:
            self._of_groups[group] = made
        return made

    def reclaim(self, wait: bool, engine: Engine | None = None) -> None:
        """Gives back all that can be, or all of one engine's. ``wait``: also those in use now, when that has ended."""
        with self._lock:
            known = self._all(engine)
        for journal in known if wait else []:
            journal.stop_user()
        with self._lock:
            idle = [journal for journal in self._all(engine) if journal.idle]
            for group in [group for group, journal in self._of_groups.items() if journal in idle]:
                del self._of_groups[group]
        for journal in idle:
            journal.free()

    def free(self, engine: Engine) -> None:
        """The optimizer is gone: gives all of an engine's back."""
        self.reclaim(wait=True, engine=engine)
        if self._all(engine):
            engine.discarded.append(self.free)

    def _all(self, engine: Engine | None) -> list[Journal]:
        return [journal for group, journal in self._of_groups.items() if engine is None or group in engine.groups]


def journal_sizes(engine: Engine) -> dict[int, int]:
    """What a journal of each group takes."""
    return {group.index: _bytes_of(group) for group in engine.groups}


def _bytes_of(group: Group) -> int:
    return group_journal_bytes(group.own_numel, len(group.params))
