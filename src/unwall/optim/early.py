"""Updates that run before ``step`` is called, while backward still computes.

[Note: speculation]
A gradient that has landed on the host can be used at once, if ``step`` will use it as it is: no clipping, no further backward,
the same learning rate. Nobody knows that yet. So the update goes *out of place* into a shadow (optim/shadows.py), and ``step``
commits it by swapping the group's blocks with the shadow's, or lets it lie and updates in place as usual (optim/commit.py).
Whatever the user does between backward and ``step``, the result is that of a synchronous step. Shadows take what host and disk
have free. Groups in host memory for which that is not enough are updated in place with a way back (optim/journaled.py), which
takes little memory, and the others at ``step``. Where the last steps say that it would be in vain, nothing is speculated
(optim/policy.py).

[Note: who waits for whom]
The thread that trains waits for updates here in two places only. Told of a gradient that has landed (``Audience.hand_out``,
never while room is made), it may wait for the last update of that one group, which it is about to update again. Asked for
memory that a ledger does not have (``Ledger.reserve`` asks ``reclaim``), it waits for what uses the shadows. The thread that
updates needs memory, too, but must not wait for itself: it gets what nobody uses at that moment. No lock is held over any of
these waits, nor while memory is allocated, because that may reclaim.

[Note: update in backward]
With ``update_in_backward=True`` the user has promised that each backward is followed by a step with the numbers of now. Then
the update runs in place and needs no shadow; breaking the promise is an error. With several ranks that is not enough: a rank
that uses groups in another order may add to this sum until backward ends. So there updates run ahead with a way back, as they
do without the promise. Which of them count is the same on every rank, because the norm is that of all ranks; what each rank has
room for is its own affair.
"""

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

from unwall.native.library import DiskError
from unwall.optim.ahead import out_of_place
from unwall.optim.commit import Commit, KeepOrRedo, TakeBack
from unwall.optim.journaled import JournaledUpdate
from unwall.optim.journaling import Journaling
from unwall.optim.policy import SpeculationPolicy
from unwall.optim.rule import UpdateRule
from unwall.optim.runs import Run
from unwall.optim.shadows import DISK_AHEAD, Shadow, Shadows
from unwall.optim.speculation import Key, Progress, Speculation, Speculations, Wanted
from unwall.optim.updates import Factor, HostUpdate, Work, on_update_thread
from unwall.runtime.engine import Engine
from unwall.runtime.failures import FailureDomain
from unwall.shards.group import Group
from unwall.shards.states import StateKey
from unwall.shards.store import Store


@dataclass(frozen=True)
class Ahead:
    """How many groups are updated ahead of the step that is to come, at this moment."""

    under_way: int
    ready: int
    """Computed: the step can use them."""
    failed: int
    """The step will update them in place."""


Speculate = Literal["shadows", "journal"] | bool
"""Whether updates run ahead of ``step``: into shadows and, where there is no room for them, in place with a way back.
``"shadows"``: only the former. ``"journal"``: as True, and refused where an optimizer has no such way back."""


class EarlyUpdates:
    """What one optimizer does when a gradient is reduced. See [Note: speculation] and [Note: update in backward]."""

    def __init__(self, rule: UpdateRule, in_place: bool, speculate: Speculate) -> None:
        self.in_place = in_place
        self._rule = rule
        self.applied: dict[Key, list[Run]] = {}
        """Groups that were updated in place since the last step, and with which numbers."""
        self.shadows = Shadows()
        self._allowed = speculate is not False
        self.journaling = Journaling(self.shadows) if speculate in (True, "journal") else None
        self._claimed: dict[Key, JournaledUpdate] = {}
        """Updates in place that the step under way decides about."""
        self._policy = SpeculationPolicy()
        self._speculations = Speculations()
        self._seen: weakref.WeakSet[Engine] = weakref.WeakSet()
        self._last: Factor | None = None

    def after_step(self, factor: Factor | None, passes: int, changed: bool = False) -> None:
        """Remembers what the step was like. ``factor``: what it clipped with, None where it did not clip. ``changed``: the
        gradients were changed by hand, as ``torch.nn.utils.clip_grad_norm_`` does it."""
        self.applied.clear()
        self.forget()
        self._policy.stepped(passes, clips=factor is not None, changed=changed)
        if self.journaling is not None:
            self.journaling.stepped()
        self._last = factor if passes <= 1 else None

    def wanted(self) -> bool:
        """Whether a speculation is likely to be committed."""
        if self._last is not None and self._last.known is not None:
            self._policy.scaled_by(self._last.known)
            self._last = None
        return self._allowed and self._policy.wanted

    def read(self) -> Ahead:
        """What was started for the step that is to come."""
        found = self._speculations.open()
        return Ahead(
            under_way=sum(speculation.under_way for speculation in found),
            ready=sum(speculation.progress is Progress.FINISHED for speculation in found),
            failed=sum(speculation.progress is Progress.FAILED for speculation in found),
        )

    def speculate(self, engine: Engine, group: Group, stores: dict[StateKey, Store], runs: list[Run]) -> None:
        """Starts the update of a group out of place, if there is a shadow for it, or in place, if there is a journal."""
        key = (id(engine), group.index)
        forgotten = self._speculations.take(key)  # a backward was forgotten without this optimizer's zero_grad
        if forgotten is not None:
            forgotten.want(Wanted.NO)
        self._know(engine)
        if self.journaling is not None:
            self.journaling.choose(engine)
        shadow = self._shadow_for(engine, group, stores)
        if shadow is None:
            self._journal(engine, group, stores, runs)
            return
        gradient = engine.gradients[group.index]
        speculation = Speculation(shadow, group.home.on_disk, stores, runs, gradient.serial, group.generation, gradient.landing)
        shadow.lend(speculation)
        try:
            speculation.compute = out_of_place(engine, group, self._rule, speculation)
        except DiskError:  # of what is written back first; whoever looks at it next is told
            speculation.want(Wanted.NO)
            return
        self._speculations.add(key, speculation)
        HostUpdate(self._speculations.run_next, engine.failures)  # as often as there are speculations

    def _journal(self, engine: Engine, group: Group, stores: dict[StateKey, Store], runs: list[Run]) -> None:
        """Starts the update of a group in place, if there is a journal for it."""
        if self.journaling is None:
            return
        update = self.journaling.begin(engine, group, stores, runs)
        if update is not None:
            self._speculations.add((id(engine), group.index), update)
            HostUpdate(self._speculations.run_next, engine.failures)

    def forget(self) -> None:
        """The gradients are gone, and with them what was computed ahead. What was updated in place is taken back."""
        found = self._speculations.open() if self.journaling is not None else []
        self._speculations.forget()
        for speculation in found:
            if isinstance(speculation, JournaledUpdate):
                HostUpdate(speculation.give_up, FailureDomain())  # in the background; whoever comes first does it

    def leave(self, engine: Engine) -> None:
        """The engine's states move to other tiers: nothing of what was computed ahead, or of its memory, is of use there."""
        self.forget()
        self.shadows.leave(engine)
        if self.journaling is not None:
            self.journaling.leave(engine)
        self._seen.discard(engine)

    def reclaim(self) -> None:
        """Host or disk are needed for something else: gives back the shadows, and makes none for a while. What was computed
        ahead is thrown away, what is being committed is waited for. See [Note: who waits for whom]."""
        self._policy.reclaimed()
        self.forget()
        self.shadows.reclaim(wait=not on_update_thread())
        if self.journaling is not None:
            self.journaling.journals.reclaim(wait=not on_update_thread())

    @contextmanager
    def claiming(self, groups: Iterable[tuple[Engine, int]]) -> Iterator[None]:
        """A step decides about what was updated in place: inside, nobody else takes it back. What it has not come to in the
        end (it failed) is as before."""
        try:
            for engine, index in groups if self.journaling is not None else ():
                pending = engine.groups[index].pending
                if isinstance(pending.ahead, JournaledUpdate) and self._speculations.has(pending.ahead):
                    self._claimed[id(engine), index], pending.ahead = pending.ahead, None
            yield
        finally:
            for update in self._claimed.values():
                if update.commit is None and update.pending is not None:
                    update.pending.ahead = update
            self._claimed.clear()

    def commit_or(self, engine: Engine, group: Group, runs: list[Run], factor: Factor, otherwise: Work) -> HostUpdate:
        """Queues a group's update: what was computed ahead, if that holds and nothing is clipped, ``otherwise`` in place."""
        claimed = self._claimed.get((id(engine), group.index))
        speculation = self._take(engine, group, runs)
        work = otherwise
        if isinstance(speculation, JournaledUpdate):
            work = KeepOrRedo(engine, speculation, factor, otherwise)
        elif speculation is not None:
            work = Commit(engine, speculation, factor, otherwise)
        elif claimed is not None:
            speculation, work = claimed, TakeBack(claimed, otherwise)
        update = HostUpdate(work, engine.failures, again=group.home.on_disk)
        if speculation is not None:
            speculation.commit = update
        return update

    def _take(self, engine: Engine, group: Group, runs: list[Run]) -> Speculation | None:
        """The speculation for a group, if what it took for granted still holds."""
        found = self._speculations.take((id(engine), group.index))
        if found is None:
            return None
        gradient = engine.gradients[group.index]
        # What has landed and was not begun is updated at the step, in the order of the next forward; what is still on its way,
        # as it arrives. The one that is next in line is let go ahead: it delays the others little.
        if found.landed and not self._speculations.is_next(found):
            found.want(Wanted.IF_BEGUN)
        if found.runs == runs and (found.serial, found.generation) == (gradient.serial, group.generation):
            return found
        found.want(Wanted.NO)
        engine.speculation.missed += 1
        return None

    def _know(self, engine: Engine) -> None:
        """Gives back what it has there when someone needs the memory."""
        if engine not in self._seen:
            self._seen.add(engine)
            for ledger in engine.tiers.ledgers.values():
                if ledger.tier != "device":
                    ledger.ask_before_refusing(self.reclaim)

    def _shadow_for(self, engine: Engine, group: Group, stores: dict[StateKey, Store]) -> Shadow | None:
        if not group.home.on_disk:
            return self.shadows.of_group(engine, group, stores)
        if not self._policy.wanted_on_disk:
            return None
        ahead = sum(other.through_disk and other.under_way for other in self._speculations.open())
        return None if ahead >= DISK_AHEAD else self.shadows.on_disk(engine, stores)


def covers(group: Group, runs: list[Run]) -> bool:
    """Whether an update writes every element of the group's owned run that is not padding."""
    return all(
        any(run.start <= segment.shard_start and segment.shard_start + segment.numel <= run.end for run in runs)
        for segment in group.owned_segments()
    )
