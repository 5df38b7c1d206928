"""Whether the states of an optimizer fit: judged when it is built, before anything is allocated."""

import gc
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress

from unwall.optim.own_states import OwnStates
from unwall.optim.rule import UpdateRule
from unwall.optim.updates import HostUpdate
from unwall.plans import PlanError
from unwall.runtime.engine import Engine
from unwall.runtime.sizes_now import sizes_now
from unwall.shards.build import Room, check_fit
from unwall.shards.group import Group
from unwall.shards.home import DEVICE, ONE_PASS, Home, Sizes
from unwall.shards.states import AVERAGE, StateSpec, moment_dtype
from unwall.shards.working import chunk_bytes


def make_room(engine: Engine, groups: Iterable[Group], rule: UpdateRule, own: OwnStates, name: str) -> None:
    """Room for a rule's states of some groups, which :func:`check_room` judges.

    The chunks that go through host memory while states on disk are updated are as large as AdamW's: they grow where the rule
    keeps more.
    """
    sizes, tiers = check_room(engine, groups, rule, own, name), engine.tiers
    homes = [group.home for group in engine.groups]
    needed = max(chunk_bytes(size, home, tiers.chunk_elements) for size, home in zip(sizes, homes, strict=True))
    if any(home.on_disk for home in homes) and needed > tiers.chunks.slot_bytes:
        # On the thread that updates: nothing else uses the ring there at the same time.
        HostUpdate(lambda: tiers.chunks.resize(needed), engine.failures).wait()


def check_room(engine: Engine, groups: Iterable[Group], rule: UpdateRule, own: OwnStates, name: str) -> list[Sizes]:
    """What all groups take, with a rule's states of some. PlanError where a budget does not hold them, with the numbers.

    ``shard`` has judged by AdamW's states, and by the parameters that were there and trained then. Where a plan has one pass,
    more get the room that it set aside on the device for sums, too ([Note: one pass] in shards/placement.py).
    """
    indices = {group.index for group in groups}
    specs = [rule.specs(group) if group.index in indices else None for group in engine.groups]
    kept = sorted({spec.name for group in engine.groups if group.index in indices for spec in rule.specs(group)})

    def measure() -> list[Sizes]:
        pairs = zip(engine.groups, specs, strict=True)
        return [sizes_now(engine, group, engine.plan, theirs, own.owner) for group, theirs in pairs]

    return _judged(engine, measure, f"{name} (its states: {', '.join(kept) or 'none'})")


def make_room_for_average(engine: Engine, groups: Iterable[Group]) -> None:
    """Room for an average of some groups, beside what training takes. PlanError where a budget does not hold it."""
    nbytes = {group.index: average_spec(group).bytes_per_element for group in groups}

    def measure() -> list[Sizes]:
        return [sizes_now(engine, group, engine.plan, average_bytes=nbytes.get(group.index, 0)) for group in engine.groups]

    _judged(engine, measure, "with unwall.ema")


def average_spec(group: Group) -> StateSpec:
    """What an average keeps of a group."""
    return StateSpec(AVERAGE, moment_dtype(group.layout.dtype))


def _judged(engine: Engine, measure: Callable[[], list[Sizes]], whose: str) -> list[Sizes]:
    """What the groups take, as ``measure`` says. PlanError where that does not fit, also without what is only left over."""
    engine.free_discarded()
    sizes = measure()
    try:
        _fit(engine, sizes, whose)
    except PlanError:
        engine.finish()  # an update in flight may hold an optimizer that is gone otherwise, or a cycle may
        gc.collect()
        engine.free_discarded()
        sizes = measure()
        if not engine.discarded:  # otherwise a drive has failed: whoever uses those groups next is told, and their states go
            _fit(engine, sizes, whose)
    return sizes


def _fit(engine: Engine, sizes: Sequence[Sizes], whose: str) -> None:
    """The groups stay as they are, or lose their room for sums if they do not fit otherwise."""
    plan = engine.plan
    room = Room(plan.budget_device_bytes, plan.budget_host_bytes, plan.budget_disk_bytes)
    chunks = engine.tiers.chunks

    def check(homes: list[Home]) -> None:
        check_fit(sizes, homes, plan, engine.ranks.size, room, whose, chunks.slots * chunks.slot_bytes)

    homes = [group.home for group in engine.groups]
    tight = [ONE_PASS if home == DEVICE and not size.adds_up else home for home, size in zip(homes, sizes, strict=True)]
    if tight != homes:
        with suppress(PlanError):
            check(homes)
            return
    check(tight)
    for group, home in zip(engine.groups, tight, strict=True):
        group.home = home
