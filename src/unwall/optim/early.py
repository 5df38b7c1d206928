"""Updates that run before ``step`` is called, while backward still computes.

[Note: speculation]
A gradient that has landed on the host can be used at once, if ``step`` will use it as it is: no clipping, no further backward,
the same learning rate. Nobody knows that yet. So the update goes *out of place* into shadow memory, and ``step`` commits it by
swapping the group's blocks with the shadow's, or lets it lie and updates in place as usual. Whatever the user does between
backward and ``step``, the result is that of a synchronous step. Shadows take what the host budget leaves free; groups without
one are updated at ``step``. Where clipping was active lately, or gradients are added up over several backwards, nothing is
speculated.

[Note: update in backward]
With ``update_in_backward=True`` the user has promised that each backward is followed by a step with the numbers of now. Then
the update runs in place and needs no shadow; breaking the promise is an error.
"""

import weakref
from contextlib import suppress
from dataclasses import dataclass

import torch

from unwall.native.pool import AdamWStep
from unwall.optim.kernels import Span, adamw, finish_updates, run_spans
from unwall.optim.runs import Run
from unwall.optim.updates import Factor, HostUpdate
from unwall.runtime.engine import Engine
from unwall.shards.group import Group
from unwall.shards.store import Store
from unwall.tiers.block import MemoryBlock
from unwall.tiers.host import HostTier, spare_bytes
from unwall.tiers.ledger import BudgetError
from unwall.tiers.ticket import Ticket

CLIP_MEMORY = 8
"""Steps without clipping after which speculation pays again."""

Spans = list[tuple[Span, AdamWStep]]
Key = tuple[int, int]
"""A group: its engine's id and its index."""


class Shadow:
    """A second place for every state of one group."""

    def __init__(self, stores: dict[str, Store], host: HostTier) -> None:
        self._stores = stores
        self._host = host
        self._blocks: dict[str, MemoryBlock] = {}
        try:
            for name, store in stores.items():
                label = f"shadow of the {store.label}"
                self._blocks[name] = host.allocate(store.block.nbytes, label, pinned=store.pinned)
        except BaseException:
            self.free()
            raise

    def tensors(self) -> dict[str, torch.Tensor]:
        return {name: block.view(self._stores[name].dtype) for name, block in self._blocks.items()}

    def swap(self) -> None:
        """The shadow becomes the state, the state the shadow."""
        for name, store in self._stores.items():
            assert isinstance(store.block, MemoryBlock)
            store.block, self._blocks[name] = self._blocks[name], store.block

    def free(self) -> None:
        for block in self._blocks.values():
            self._host.free(block)
        self._blocks.clear()


@dataclass
class Speculation:
    """An update into a shadow, and what it took for granted."""

    shadow: Shadow
    runs: list[Run]
    serial: int
    """Of the gradient."""
    generation: int
    """Of the group."""
    update: HostUpdate | None = None
    cancelled: bool = False
    """Not to be begun any more: ``step`` has come."""
    finished: bool = False


class EarlyUpdates:
    """What one optimizer does when a gradient has landed. See [Note: speculation] and [Note: update in backward]."""

    def __init__(self, in_place: bool) -> None:
        self.in_place = in_place
        self.applied: dict[Key, list[Run]] = {}
        """Groups that were updated in place since the last step, and with which numbers."""
        self._speculations: dict[Key, Speculation] = {}
        self._shadows: weakref.WeakKeyDictionary[Group, Shadow] = weakref.WeakKeyDictionary()
        self._chosen: weakref.WeakKeyDictionary[Engine, set[int]] = weakref.WeakKeyDictionary()
        self._exhausted = False
        self._quiet_steps = -1  # no step yet: a first step takes its memory before shadows do
        self._last: Factor | None = None

    def after_step(self, factor: Factor | None, passes: int) -> None:
        """Remembers what the step was like. ``factor``: what it clipped with, None where it did not clip."""
        self.applied.clear()
        self._speculations.clear()
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
        assert gradient.value is not None
        sources = run_spans({name: store.tensor() for name, store in stores.items()}, gradient.value, runs)
        targets = run_spans(shadow.tensors(), gradient.value, runs)
        landing = gradient.landing
        speculation = Speculation(shadow, runs, gradient.serial, group.generation)

        def work() -> None:
            if speculation.cancelled:
                return
            if landing is not None:
                landing.wait()
            pairs = zip(sources, targets, strict=True)
            tickets = [(adamw(source, step, out=target), source) for (source, step), (target, _) in pairs]
            finish_updates(engine.tiers.updates, f"{group.name}, ahead", tickets)
            speculation.finished = True

        speculation.update = HostUpdate(work, engine.tiers.updates)
        self._speculations[id(engine), group.index] = speculation

    def forget(self) -> None:
        """The gradients are gone, and with them what was computed ahead."""
        self._speculations.clear()

    def reclaim(self) -> None:
        """The host needs its memory for something else: gives back the shadows, and makes no more. What was computed ahead is
        thrown away; what is being committed stays."""
        self._exhausted = True
        for speculation in self._speculations.values():
            if speculation.update is not None:
                with suppress(Exception):
                    speculation.update.wait()  # it writes there
        self._speculations.clear()
        for group, shadow in list(self._shadows.items()):
            if group.update is None or group.update.done():
                del self._shadows[group]
                shadow.free()

    def take(self, engine: Engine, group: Group, runs: list[Run]) -> Speculation | None:
        """The speculation for a group, if what it took for granted still holds."""
        found = self._speculations.pop((id(engine), group.index), None)
        if found is None:
            return None
        serial = engine.gradients[group.index].serial
        # Where the gradient is there and the update has not begun, updates are what is slow: the order of the next forward
        # serves it best. Where it is still on its way, the order of arrival does.
        landing = engine.gradients[group.index].landing
        found.cancelled = landing is None or landing.done()
        if found.runs == runs and (found.serial, found.generation) == (serial, group.generation):
            return found
        engine.speculation.missed += 1
        return None

    def _shadow_for(self, engine: Engine, group: Group, stores: dict[str, Store]) -> Shadow | None:
        if engine not in self._chosen:
            self._chosen[engine] = choose_shadowed(engine)
            engine.tiers.host.reclaimers.append(weakref.WeakMethod(self.reclaim))
        if group not in self._shadows and group.index in self._chosen[engine]:
            try:
                self._shadows[group] = Shadow(stores, engine.tiers.host)
            except (BudgetError, MemoryError, RuntimeError):  # someone else took the memory, or it cannot be page-locked
                self._chosen[engine].discard(group.index)
        return self._shadows.get(group)

    def free(self) -> None:
        """Gives the shadows back."""
        for speculation in self._speculations.values():
            if speculation.update is not None:
                speculation.update.wait()
        for group, shadow in self._shadows.items():
            with suppress(Exception):  # what failed was reported where it was waited for
                group.finish_update()  # it may still swap
            shadow.free()
        self._shadows.clear()
        self._speculations.clear()


def choose_shadowed(engine: Engine) -> set[int]:
    """The groups that get a shadow: the first of the model. The next forward needs them first, and has no time to wait for
    their update; those that are needed later can be updated meanwhile."""
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


def commit_or_update(
    engine: Engine, speculation: Speculation, spans: Spans, landing: Ticket | None, factor: Factor, label: str
) -> HostUpdate:
    """Queues the end of a speculation: committed if nothing is clipped after all, otherwise an update in place."""

    def work() -> None:
        assert speculation.update is not None
        error = speculation.update.failure()  # ended: the queue has run it before this
        if error is not None:
            raise error
        scale = factor.get()
        if scale == 1.0 and speculation.finished:
            speculation.shadow.swap()
            engine.speculation.committed += 1
            return
        engine.speculation.missed += scale != 1.0  # otherwise it was only too late
        if landing is not None:
            landing.wait()
        tickets = [(adamw(span, step.scaled(scale)), span) for span, step in spans]
        finish_updates(engine.tiers.updates, label, tickets)

    return HostUpdate(work, engine.tiers.updates)


def covers(group: Group, runs: list[Run]) -> bool:
    """Whether an update writes every element of the group's owned run that is not padding."""
    return all(
        any(run.start <= segment.shard_start and segment.shard_start + segment.numel <= run.end for run in runs)
        for segment in group.owned_segments()
    )
