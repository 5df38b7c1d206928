"""Updates that run before ``step`` is called, while backward still computes.

[Note: speculation]
A gradient that has landed on the host can be used at once, if ``step`` will use it as it is: no clipping, no further backward,
the same learning rate. Nobody knows that yet. So the update goes *out of place* into a shadow (optim/shadows.py), and ``step``
commits it by swapping the group's blocks with the shadow's, or lets it lie and updates in place as usual. Whatever the user
does between backward and ``step``, the result is that of a synchronous step. Shadows take what host and disk have free; groups
without one are updated at ``step``. Where clipping was active lately, or gradients are added up over several backwards,
nothing is speculated.

[Note: update in backward]
With ``update_in_backward=True`` the user has promised that each backward is followed by a step with the numbers of now. Then
the update runs in place and needs no shadow; breaking the promise is an error.
"""

import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from unwall.native.library import DiskError
from unwall.optim.disk_update import DiskUpdate, Parts
from unwall.optim.kernels import adamw, finish_updates, run_spans
from unwall.optim.runs import Run
from unwall.optim.shadows import DISK_AHEAD, Shadow, Shadows
from unwall.optim.updates import Factor, HostUpdate
from unwall.runtime.engine import Engine
from unwall.shards.group import Group
from unwall.shards.store import Store

CLIP_MEMORY = 8
"""Steps without clipping after which speculation pays again."""

Key = tuple[int, int]
"""A group: its engine's id and its index."""


@dataclass
class Speculation:
    """An update into a shadow, and what it took for granted."""

    shadow: Shadow
    through_disk: bool
    stores: dict[str, Store]
    runs: list[Run]
    serial: int
    """Of the gradient."""
    generation: int
    """Of the group."""
    update: HostUpdate | None = None
    cancelled: bool = False
    """Not to be begun any more: ``step`` has come."""
    dropped: bool = False
    """Not wanted any more, however far it has come."""
    begun: bool = False
    finished: bool = False

    def under_way(self) -> bool:
        return self.update is not None and not self.update.done()


class EarlyUpdates:
    """What one optimizer does when a gradient has landed. See [Note: speculation] and [Note: update in backward]."""

    def __init__(self, in_place: bool) -> None:
        self.in_place = in_place
        self.applied: dict[Key, list[Run]] = {}
        """Groups that were updated in place since the last step, and with which numbers."""
        self._speculations: dict[Key, Speculation] = {}
        self._shadows = Shadows()
        self._seen: weakref.WeakSet[Engine] = weakref.WeakSet()
        self._exhausted = False
        self._quiet_steps = -1  # no step yet: a first step takes its memory before shadows do
        self._last: Factor | None = None

    def after_step(self, factor: Factor | None, passes: int) -> None:
        """Remembers what the step was like. ``factor``: what it clipped with, None where it did not clip."""
        self.applied.clear()
        self.forget()
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
        return self._quiet_steps >= CLIP_MEMORY and not self._exhausted

    def speculate(self, engine: Engine, group: Group, stores: dict[str, Store], runs: list[Run]) -> None:
        """Starts the update of a group out of place, if there is a shadow for it."""
        shadow = self._shadow_for(engine, group, stores)
        if shadow is None:
            return
        gradient = engine.gradients[group.index]
        speculation = Speculation(shadow, group.home.on_disk, stores, runs, gradient.serial, group.generation)
        compute = _through_disk if speculation.through_disk else _in_memory
        run = compute(engine, group, speculation)

        def work() -> None:
            if not speculation.cancelled and not speculation.dropped:
                speculation.begun = True
                speculation.finished = run()

        speculation.update = shadow.user = HostUpdate(work, engine.tiers.updates)
        self._speculations[id(engine), group.index] = speculation

    def forget(self) -> None:
        """The gradients are gone, and with them what was computed ahead."""
        for speculation in self._speculations.values():
            speculation.dropped = True
        self._speculations.clear()

    def reclaim(self) -> None:
        """The host needs its memory for something else: gives back the shadows, and makes no more. What was computed ahead is
        thrown away; what is being committed stays."""
        self._exhausted = True
        self._end_speculations()
        self._shadows.reclaim()

    def take(self, engine: Engine, group: Group, runs: list[Run]) -> Speculation | None:
        """The speculation for a group, if what it took for granted still holds."""
        key = (id(engine), group.index)
        found = self._speculations.get(key)
        if found is None:
            return None
        serial = engine.gradients[group.index].serial
        # Where gradients are there and their updates have not begun, updates are what is slow: the order of the next forward
        # serves it best. Where they are still on their way, or one is next, the order of arrival does.
        landing = engine.gradients[group.index].landing
        waiting = next((other for other in self._speculations.values() if not other.begun), None)
        found.cancelled = found is not waiting and (landing is None or landing.done())
        del self._speculations[key]
        if found.runs == runs and (found.serial, found.generation) == (serial, group.generation):
            return found
        found.dropped = True
        engine.speculation.missed += 1
        return None

    def free(self) -> None:
        """Gives the shadows back."""
        self._end_speculations()
        self._shadows.free()

    def _end_speculations(self) -> None:
        for speculation in self._speculations.values():
            if speculation.update is not None:
                with suppress(Exception):
                    speculation.update.wait()  # it writes there
        self._speculations.clear()

    def _shadow_for(self, engine: Engine, group: Group, stores: dict[str, Store]) -> Shadow | None:
        if engine not in self._seen:
            self._seen.add(engine)
            engine.tiers.host.reclaimers.append(weakref.WeakMethod(self.reclaim))
        if not group.home.on_disk:
            return self._shadows.of_group(engine, group, stores)
        others = self._speculations.values()
        if sum(other.through_disk and other.under_way() for other in others) >= DISK_AHEAD:
            return None
        return self._shadows.on_disk(engine, stores, [other.shadow for other in others])


def _in_memory(engine: Engine, group: Group, speculation: Speculation) -> Callable[[], bool]:
    """The update of a group in host memory, out of place; says whether it was done."""
    gradient, stores = engine.gradients[group.index], speculation.stores
    assert gradient.value is not None
    sources = run_spans({name: store.tensor() for name, store in stores.items()}, gradient.value, speculation.runs)
    targets = run_spans(speculation.shadow.tensors(stores), gradient.value, speculation.runs)
    landing = gradient.landing

    def run() -> bool:
        if landing is not None:
            landing.wait()
        pairs = zip(sources, targets, strict=True)
        tickets = [(adamw(source, step, out=target), source) for (source, step), (target, _) in pairs]
        finish_updates(engine.tiers.updates, f"{group.name}, ahead", tickets)
        return True

    return run


def _through_disk(engine: Engine, group: Group, speculation: Speculation) -> Callable[[], bool]:
    """The same for a group with states on disk. A drive that fails is no error yet: ``step`` will update in place."""
    gradient = engine.gradients[group.index]
    grad = gradient.stored or gradient.value
    assert grad is not None
    group.staging.close()  # what was looked at, or loaded, is on disk again before it is read there
    parts = Parts(speculation.stores, grad, speculation.shadow.blocks)
    update = DiskUpdate(f"{group.name}, ahead", parts, speculation.runs, engine.tiers, gradient.landing, Factor(1.0, None))

    def run() -> bool:
        try:
            update.work(lambda: speculation.dropped)
        except DiskError:
            return False
        finally:
            update.abandon()
        return True

    return run


def or_commit(engine: Engine, speculation: Speculation, factor: Factor, otherwise: Callable[[], None]) -> Callable[[], None]:
    """The end of a speculation: committed if nothing is clipped after all, otherwise an update in place."""
    redo = False

    def work() -> None:
        nonlocal redo
        if not redo:
            assert speculation.update is not None
            error = speculation.update.failure()  # ended: the queue has run it before this
            if error is not None:
                raise error
            scale = factor.get()
            if scale == 1.0 and speculation.finished:
                speculation.shadow.swap(speculation.stores)
                engine.speculation.committed += 1
                return
            engine.speculation.missed += scale != 1.0  # otherwise it was only too late
            redo = True
        otherwise()

    return work


def covers(group: Group, runs: list[Run]) -> bool:
    """Whether an update writes every element of the group's owned run that is not padding."""
    return all(
        any(run.start <= segment.shard_start and segment.shard_start + segment.numel <= run.end for run in runs)
        for segment in group.owned_segments()
    )
