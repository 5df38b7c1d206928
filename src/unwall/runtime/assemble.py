"""A model becomes a sharded one: groups, homes, tiers, engine and hooks, in this order. ``unwall.shard`` and the planner's dry
run both go this way; they differ in the tiers they use and in where values come from."""

from collections.abc import Callable

import torch
from torch import nn

from unwall.native import interrupts
from unwall.plans import Plan
from unwall.runtime.card import probe_of
from unwall.runtime.engine import Engine
from unwall.runtime.hooks import install
from unwall.schedule.limit import Limit
from unwall.shards.arrange import arrange
from unwall.shards.build import Room, make_groups
from unwall.shards.collectives import Ranks
from unwall.shards.dimensions import Others
from unwall.shards.grouping import Cuts, uncut
from unwall.shards.home import Home, Sizes, host_bytes_of
from unwall.shards.working import host_working_bytes, least_device_bytes
from unwall.tiers.tiers import Tiers


def assemble(
    model: nn.Module,
    plan: Plan,
    ranks: Ranks,
    room: Room,
    make_tiers: Callable[[list[Sizes], list[Home]], Tiers],
    whole_value: Callable[[nn.Parameter], torch.Tensor | None],
    cuts: Cuts = uncut,
    others: Others | None = None,
) -> Engine:
    """Shards a model in place. PlanError, before anything is allocated, where the plan does not fit ``room``.

    ``make_tiers`` is told what the groups take and where they will live. ``whole_value`` gives a parameter's value, or None
    where there is none yet. ``cuts`` says which parameters lie in several slots.
    ``others``: the ranks of other dimensions of the mesh.
    """
    planned, sizes, homes = arrange(model, plan, ranks.size, room, cuts, 1 if others is None else others.replica_count)
    tiers = make_tiers(sizes, homes)
    groups, gradients = make_groups(planned, homes, plan, tiers, ranks, lambda entry: whole_value(entry.param))
    for group, size, (unit, _) in zip(groups, sizes, planned, strict=True):
        group.at_once_bytes, group.several, group.judged = size.at_once_bytes, unit.several, size.trainable
    engine = Engine(plan, groups, gradients, tiers, ranks, others)
    keep_within_card(engine, sizes, homes)
    install(engine, model)
    interrupts.install()
    return engine


def keep_within_card(engine: Engine, sizes: list[Sizes], homes: list[Home]) -> None:
    """Where the plan has no ``device_bytes``, what is fetched stays as far as the card has room for it."""
    device, limit = engine.tiers.device, None
    held = sum(host_bytes_of(*pair) for pair in zip(sizes, homes, strict=True))
    engine.least_host_bytes = held + host_working_bytes(sizes, homes)
    engine.least_device_bytes = least_device_bytes(sizes, homes)
    probe = probe_of(device.device)
    if engine.plan.budget_device_bytes is None and probe is not None and any(group.fetch_bytes for group in engine.groups):
        limit = Limit(probe, lambda: device.ledger.live_bytes, engine.least_device_bytes)
    engine.executor.keep_within(limit)
    if engine.activations is not None:
        engine.activations.measure_anew()
