"""Which groups are updated in place with a way back, and how that begins. See [Note: journal] in optim/journaled.py."""

import weakref

from unwall.native.pool import AdamWStep
from unwall.optim.journaled import FIRST_STEP, JournaledUpdate, journaled_work
from unwall.optim.journals import Journals, journal_sizes
from unwall.optim.policy import REST_STEPS, Room, Way, choose_ways
from unwall.optim.rule import spans_of
from unwall.optim.runs import Run
from unwall.optim.shadows import Shadows, shadow_sizes
from unwall.runtime.engine import Engine
from unwall.shards.group import Group
from unwall.shards.states import StateKey
from unwall.shards.store import Store
from unwall.tiers.host import spare_bytes

CROWDED_STEPS = 4
"""Steps at which a group waits after most of its elements did not fit."""


class Journaling:
    """Of one optimizer. A group that someone looked at between backward and step, or most of whose elements did not fit, is
    left alone for a while: there the way back would cost time again and again. (The first is a habit of the loop; the second
    comes with a gradient that is far larger than those before, and passes, unless most gradients of the group are zero in most
    steps.)"""

    def __init__(self, shadows: Shadows) -> None:
        self.journals = Journals()
        self._shadows = shadows
        self._ways: weakref.WeakKeyDictionary[Engine, dict[int, Way]] = weakref.WeakKeyDictionary()
        self._resting: weakref.WeakKeyDictionary[Group, int] = weakref.WeakKeyDictionary()

    def choose(self, engine: Engine) -> None:
        """Once for each model: [Note: which way] in optim/policy.py."""
        if engine in self._ways:
            return
        shadows, journals = shadow_sizes(engine), journal_sizes(engine)
        rooms = [Room(shadows[index], journals[index]) for index in shadows]
        ways = dict(zip(shadows, choose_ways(rooms, spare_bytes(engine.tiers.host.ledger)), strict=True))
        self._ways[engine] = ways
        self._shadows.choose(engine, {index for index, way in ways.items() if way is Way.SHADOW})

    def begin(self, engine: Engine, group: Group, stores: dict[StateKey, Store], runs: list[Run]) -> JournaledUpdate | None:
        """An update of a group that is known to it, and ready to be run. None: it waits for the step."""
        if self._ways[engine].get(group.index) is not Way.JOURNAL or group in self._resting or not _fits(runs):
            return None
        journal = self.journals.of_group(engine, group)
        if journal is None:
            return None
        gradient, pending = engine.gradients[group.index], group.pending
        update = JournaledUpdate(None, False, stores, runs, gradient.serial, group.generation, gradient.landing)
        journal.lend(update)
        update.journal, update.pending, update.on_disturbed = journal, pending, lambda: self._rest(group)
        tensors = {key: store.tensor(write=False) for key, store in stores.items()}  # takes back what another has ahead
        update.spans = spans_of(tensors, gradient.value, runs)
        update.compute = journaled_work(engine, group, update, on_crowded=lambda: self._rest(group, CROWDED_STEPS))
        pending.ahead = update
        return update

    def stepped(self) -> None:
        """A step was taken."""
        for group, left in list(self._resting.items()) if len(self._resting) else ():
            if left > 1:
                self._resting[group] = left - 1
            else:
                del self._resting[group]

    def leave(self, engine: Engine) -> None:
        """The states of an engine will live elsewhere."""
        self.journals.reclaim(wait=True, engine=engine)
        self._ways.pop(engine, None)

    def _rest(self, group: Group, steps: int = REST_STEPS) -> None:
        self._resting[group] = steps


def _fits(runs: list[Run]) -> bool:
    return all(isinstance(run.key, AdamWStep) and run.key.step >= FIRST_STEP for run in runs)
