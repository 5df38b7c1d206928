"""Updates that run before ``step`` is called, while backward still computes.

[Note: speculation]
A gradient that has landed on the host can be used at once, if ``step`` will use it as it is: no clipping, no further backward,
the same learning rate. Nobody knows that yet. So the update goes *out of place* into a shadow (optim/shadows.py), and ``step``
commits it by swapping the group's blocks with the shadow's, or lets it lie and updates in place as usual. Whatever the user
does between backward and ``step``, the result is that of a synchronous step. Shadows take what host and disk have free; groups
without one are updated at ``step``. Where clipping was active lately, or gradients are added up over several backwards,
nothing is speculated.

[Note: newest first]
Of the gradients that have landed, the newest is used first: it belongs to the front of the model, which the next forward needs
first. Where the host updates more slowly than backward computes, something is left over at ``step``. Taken in the order of
landing that would be the front of the model, all of it, and forward would wait. This way it is a group here and there, updated
while forward is on its way to it.

[Note: update in backward]
With ``update_in_backward=True`` the user has promised that each backward is followed by a step with the numbers of now. Then
the update runs in place and needs no shadow; breaking the promise is an error.
"""

import enum
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field

from unwall.native.library import DiskError
from unwall.optim.disk_update import DiskUpdate, Parts
from unwall.optim.rule import UpdateRule, finish_updates, spans_of
from unwall.optim.runs import Run
from unwall.optim.shadows import DISK_AHEAD, Shadow, Shadows
from unwall.optim.updates import Factor, HostUpdate, on_update_thread
from unwall.runtime.engine import Engine
from unwall.shards.group import Group
from unwall.shards.states import StateKey
from unwall.shards.store import Store
from unwall.tiers.ticket import Ticket

CLIP_MEMORY = 8
"""Steps without clipping after which speculation pays again."""
REST_STEPS = 50
"""Steps without speculation after someone needed the memory of the shadows."""

Key = tuple[int, int]
"""A group: its engine's id and its index."""


class Wanted(enum.Enum):
    """Whether the result of a speculation can be of use. Decided by the thread that trains."""

    YES = "yes"
    IF_BEGUN = "if it has begun"
    """``step`` has come, and will use what there is."""
    NO = "no"


class Progress(enum.Enum):
    """How far a speculation is. Decided by the thread that updates, which begins only what is wanted."""

    QUEUED = "queued"
    RUNNING = "running"
    FINISHED = "finished"
    FAILED = "failed"
    RESOLVED = "resolved"
    """Committed, or given up for an update in place."""


@dataclass(eq=False)
class Speculation:
    """An update into a shadow, and what it took for granted."""

    shadow: Shadow
    through_disk: bool
    stores: dict[StateKey, Store]
    runs: list[Run]
    serial: int
    """Of the gradient."""
    generation: int
    """Of the group."""
    landing: Ticket | None
    compute: Callable[[], None] = lambda: None
    wanted: Wanted = Wanted.YES
    progress: Progress = Progress.QUEUED
    commit: HostUpdate | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _ended: threading.Event = field(default_factory=threading.Event)

    def begin(self) -> bool:
        """On the thread that updates: whether to go on with ``run``."""
        with self._lock:
            if self.wanted is Wanted.YES and self.progress is Progress.QUEUED:
                self.progress = Progress.RUNNING
                return True
            return False

    def run(self) -> None:
        """A failure is no error yet: ``step`` will update in place."""
        try:
            self.compute()
            self.progress = Progress.FINISHED
        except Exception:
            self.progress = Progress.FAILED
        self._ended.set()

    def want(self, wanted: Wanted) -> None:
        with self._lock:
            self.wanted = wanted

    @property
    def landed(self) -> bool:
        """The gradient is there."""
        return self.landing is None or self.landing.done()

    @property
    def under_way(self) -> bool:
        return self.wanted is not Wanted.NO and self.progress in (Progress.QUEUED, Progress.RUNNING)

    @property
    def settled(self) -> bool:
        """It will not touch its shadow any more."""
        if self.progress is Progress.RESOLVED:
            return True
        return self.wanted is Wanted.NO and self.progress is not Progress.RUNNING

    def stop(self) -> None:
        """Waits until it is settled, and gives up what will not be committed."""
        if self.commit is not None:
            self.commit.wait()
            return
        self.want(Wanted.NO)
        if self.progress is Progress.RUNNING:
            self._ended.wait()


class EarlyUpdates:
    """What one optimizer does when a gradient has landed. See [Note: speculation] and [Note: update in backward]."""

    def __init__(self, in_place: bool, rule: UpdateRule) -> None:
        self.in_place = in_place
        self._rule = rule
        self.applied: dict[Key, list[Run]] = {}
        """Groups that were updated in place since the last step, and with which numbers."""
        self.shadows = Shadows()
        self._speculations: dict[Key, Speculation] = {}
        self._waiting: list[Speculation] = []
        """Not begun, the newest last."""
        self._lock = threading.Lock()  # of that list
        self._seen: weakref.WeakSet[Engine] = weakref.WeakSet()
        self._quiet_steps = -1  # no step yet: a first step takes its memory before shadows do
        self._rest_steps = 0
        self._last: Factor | None = None

    def after_step(self, factor: Factor | None, passes: int) -> None:
        """Remembers what the step was like. ``factor``: what it clipped with, None where it did not clip."""
        self.applied.clear()
        self.forget()
        self._rest_steps = max(0, self._rest_steps - 1)
        self._last = factor
        if passes > 1:
            self._quiet_steps, self._last = 0, None
        elif factor is None:
            self._quiet_steps = CLIP_MEMORY

    def wanted(self) -> bool:
        """Whether a speculation is likely to be committed."""
        if self._last is not None and self._last.known is not None:
            self._quiet_steps = max(0, self._quiet_steps) + 1 if self._last.known == 1.0 else 0
            self._last = None
        return self._quiet_steps >= CLIP_MEMORY and self._rest_steps == 0

    def speculate(self, engine: Engine, group: Group, stores: dict[StateKey, Store], runs: list[Run]) -> None:
        """Starts the update of a group out of place, if there is a shadow for it."""
        key = (id(engine), group.index)
        if key in self._speculations:  # a backward was forgotten without this optimizer's zero_grad
            self._speculations.pop(key).want(Wanted.NO)
        shadow = self._shadow_for(engine, group, stores)
        if shadow is None:
            return
        gradient = engine.gradients[group.index]
        speculation = Speculation(shadow, group.home.on_disk, stores, runs, gradient.serial, group.generation, gradient.landing)
        try:
            make = _through_disk if speculation.through_disk else _in_memory
            speculation.compute = make(engine, group, self._rule, speculation)
        except DiskError:  # of what is written back first; whoever looks at it next is told
            return
        shadow.lend(speculation)
        self._speculations[key] = speculation
        with self._lock:
            self._waiting.append(speculation)
        HostUpdate(self._run_next, engine.tiers.updates)

    def _run_next(self) -> None:
        """See [Note: newest first]. As often as there were speculations, each time the best of those that wait."""
        found = self._next(remove=True)
        if found is not None and found.begin():
            found.run()

    def _next(self, remove: bool = False) -> Speculation | None:
        with self._lock:
            self._waiting = [waiting for waiting in self._waiting if waiting.wanted is Wanted.YES]
            landed = [waiting for waiting in self._waiting if waiting.landed]
            found = landed[-1] if landed else next(iter(self._waiting), None)  # the oldest lands first
            if found is not None and remove:
                self._waiting.remove(found)
            return found

    def forget(self) -> None:
        """The gradients are gone, and with them what was computed ahead."""
        for speculation in self._speculations.values():
            speculation.want(Wanted.NO)
        self._speculations.clear()
        self._next()  # keeps nothing that is not wanted

    def reclaim(self) -> None:
        """Host or disk are needed for something else: gives back the shadows, and makes none for a while. What was computed
        ahead is thrown away, what is being committed is waited for."""
        self._rest_steps = REST_STEPS
        self.forget()
        self.shadows.reclaim(wait=not on_update_thread())

    def commit_or(
        self, engine: Engine, group: Group, runs: list[Run], factor: Factor, otherwise: Callable[[], None]
    ) -> HostUpdate:
        """Queues a group's update: what was computed ahead, if that holds and nothing is clipped, ``otherwise`` in place."""
        speculation = self._take(engine, group, runs)
        work = otherwise if speculation is None else _ending(engine, speculation, factor, otherwise)
        update = HostUpdate(work, engine.tiers.updates, again=group.home.on_disk)
        if speculation is not None:
            speculation.commit = update
        return update

    def _take(self, engine: Engine, group: Group, runs: list[Run]) -> Speculation | None:
        """The speculation for a group, if what it took for granted still holds."""
        key = (id(engine), group.index)
        found = self._speculations.get(key)
        if found is None:
            return None
        gradient = engine.gradients[group.index]
        # What has landed and was not begun goes in the order of the next forward; what is still on its way, as it arrives. One
        # that is next does not wait for this step, which costs the others little.
        if found.landed and found is not self._next():
            found.want(Wanted.IF_BEGUN)
        del self._speculations[key]
        if found.runs == runs and (found.serial, found.generation) == (gradient.serial, group.generation):
            return found
        found.want(Wanted.NO)
        engine.speculation.missed += 1
        return None

    def _shadow_for(self, engine: Engine, group: Group, stores: dict[StateKey, Store]) -> Shadow | None:
        if engine not in self._seen:
            self._seen.add(engine)
            for ledger in engine.tiers.ledgers.values():
                if ledger.tier != "device":
                    ledger.reclaimers.append(weakref.WeakMethod(self.reclaim))
        if not group.home.on_disk:
            return self.shadows.of_group(engine, group, stores)
        ahead = sum(other.through_disk and other.under_way for other in self._speculations.values())
        return None if ahead >= DISK_AHEAD else self.shadows.on_disk(engine, stores)


def _in_memory(engine: Engine, group: Group, rule: UpdateRule, speculation: Speculation) -> Callable[[], None]:
    """The update of a group in host memory, out of place."""
    gradient, stores = engine.gradients[group.index], speculation.stores
    assert gradient.value is not None
    sources = spans_of({key: store.tensor() for key, store in stores.items()}, gradient.value, speculation.runs)
    targets = spans_of(speculation.shadow.tensors(stores), gradient.value, speculation.runs)
    landing = gradient.landing

    def compute() -> None:
        if landing is not None:
            landing.wait()
        finish_updates(engine.tiers.updates, f"{group.name}, ahead", sources, rule.on_host(sources, 1.0, targets))

    return compute


def _through_disk(engine: Engine, group: Group, rule: UpdateRule, speculation: Speculation) -> Callable[[], None]:
    """The same for a group with states on disk."""
    gradient = engine.gradients[group.index]
    grad = gradient.stored or gradient.value
    assert grad is not None
    parts = Parts(speculation.stores, grad, speculation.shadow.blocks)
    name, factor = f"{group.name}, ahead", Factor(1.0, None)
    update = DiskUpdate(name, rule, parts, speculation.runs, engine.tiers, gradient.landing, factor)

    def compute() -> None:
        try:
            update.work(dropped=lambda: speculation.wanted is Wanted.NO)
        finally:
            update.abandon()

    return compute


def _ending(engine: Engine, speculation: Speculation, factor: Factor, otherwise: Callable[[], None]) -> Callable[[], None]:
    """Commits a speculation or gives it up. After it was given up, another attempt only does what is left in place."""

    def work() -> None:
        if speculation.progress is not Progress.RESOLVED:
            scale = factor.get()
            usable = speculation.progress is Progress.FINISHED
            if scale == 1.0 and usable:
                speculation.shadow.swap(speculation.stores)
                engine.speculation.committed += 1
            speculation.progress = Progress.RESOLVED
            if scale == 1.0 and usable:
                return
            engine.speculation.missed += scale != 1.0  # otherwise it was only too late
        otherwise()

    return work


def covers(group: Group, runs: list[Run]) -> bool:
    """Whether an update writes every element of the group's owned run that is not padding."""
    return all(
        any(run.start <= segment.shard_start and segment.shard_start + segment.numel <= run.end for run in runs)
        for segment in group.owned_segments()
    )
