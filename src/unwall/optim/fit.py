"""Whether the states of an optimizer fit: judged when it is built, before anything is allocated."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress

from unwall.optim.own_states import OwnStates
from unwall.optim.rule import UpdateRule
from unwall.optim.updates import HostUpdate
from unwall.plans import PlanError
from unwall.runtime.engine import Engine
from unwall.shards.build import Room, check_fit, group_sizes
from unwall.shards.group import Group
from unwall.shards.home import DEVICE, ONE_PASS, Home, Sizes
from unwall.shards.states import GROUP, adamw_specs, bytes_per_element, master_specs
from unwall.shards.working import chunk_bytes


def make_room(engine: Engine, groups: Iterable[Group], rule: UpdateRule, own: OwnStates, name: str) -> None:
    """Room for a rule's states of some groups. PlanError where a budget does not hold them, with the numbers.

    ``shard`` has judged by AdamW's states. Where a plan has one pass, larger ones get the room that it set aside on the device
    for sums, too ([Note: one pass] in shards/placement.py). The chunks that go through host memory while states on disk are
    updated are as large as AdamW's: they grow where the rule keeps more.
    """
    indices = {group.index for group in groups}
    sizes = [_sizes(engine, group, rule if group.index in indices else None, own) for group in engine.groups]
    plan, tiers = engine.plan, engine.tiers
    room = Room(plan.budget_device_bytes, plan.budget_host_bytes, plan.budget_disk_bytes)
    kept = sorted({spec.name for group in engine.groups if group.index in indices for spec in rule.specs(group)})
    whose = f"{name} (its states: {', '.join(kept) or 'none'})"
    homes = _fitting(engine, sizes, lambda homes: check_fit(sizes, homes, plan, engine.ranks.size, room, whose))
    needed = max(chunk_bytes(size, home, tiers.chunk_elements) for size, home in zip(sizes, homes, strict=True))
    if any(home.on_disk for home in homes) and needed > tiers.chunks.slot_bytes:
        # On the thread that updates: nothing else uses the ring there at the same time.
        HostUpdate(lambda: tiers.chunks.resize(needed), engine.failures).wait()


def _fitting(engine: Engine, sizes: Sequence[Sizes], check: Callable[[list[Home]], None]) -> list[Home]:
    """The homes of the groups, without room for sums if they do not fit otherwise."""
    homes = [group.home for group in engine.groups]
    tight = [
        ONE_PASS if group.home == DEVICE and not size.adds_up and all(slot.whole for slot in group.layout.slots) else group.home
        for group, size in zip(engine.groups, sizes, strict=True)
    ]
    if tight != homes:
        with suppress(PlanError):
            check(homes)
            return homes
    check(tight)
    for group, home in zip(engine.groups, tight, strict=True):
        group.home = home
    return tight


def _sizes(engine: Engine, group: Group, rule: UpdateRule | None, own: OwnStates) -> Sizes:
    """What a group takes, with the rule's states, with those of other optimizers or, where there are none yet, AdamW's."""
    others = {key: store for key, store in group.states.items() if key.owner not in (GROUP, own.owner)}
    trainable = rule is not None or any(param.requires_grad for param in group.params)
    held, master = sum(store.nbytes for store in others.values()) // max(1, group.own_numel), 0
    if trainable or any(key.owner == GROUP for key in group.states):
        master = bytes_per_element(master_specs(group.layout.dtype, group.lean))
    if rule is not None:
        held += bytes_per_element(rule.specs(group))
    elif trainable and not others:
        held += bytes_per_element(adamw_specs(group.layout.dtype, group.lean))
    plan, ranks, replicas = engine.plan, engine.ranks.size, engine.others.replica_count
    return group_sizes(group.layout, held + master, trainable, plan, ranks, master_bytes=master, replicas=replicas)
