"""Groups and homes for a model that fit the budgets, if there are any.

[Note: smaller groups]
Groups are at most an eighth of ``device_bytes`` (shards/grouping.py), so a larger budget makes larger groups, of which more
must be on the device at once. Where that does not fit, smaller groups may: half as large, a quarter, and so on, to single
modules. So a budget that is larger than an accepted one is accepted, too.
"""

from dataclasses import replace
from typing import Any

from torch import nn

from unwall.plans import Plan, PlanError
from unwall.shards.build import Room, check_fit, plan_groups, sizes_of
from unwall.shards.grouping import Cuts, Unit, group_bytes, uncut
from unwall.shards.layout import Layout
from unwall.shards.placement import Home, Sizes, place

Planned = list[tuple[Unit, Layout]]
_TIERS = ("device", "host", "disk")
_TRIES = 16


def arrange(
    model: nn.Module, plan: Plan, world_size: int, room: Room, cuts: Cuts = uncut
) -> tuple[Planned, list[Sizes], list[Home]]:
    """The groups of a model, what they take, and a home for each. PlanError, with the numbers and the nearest plan that would
    fit, before anything is allocated.

    ``room``: what the plan says, or what the machine has.
    """
    try:
        return _arrange(model, plan, world_size, room, cuts)
    except PlanError as refusal:
        raise _tried(refusal, model, plan, world_size, room, cuts) from None


def _tried(refusal: PlanError, model: nn.Module, plan: Plan, world_size: int, room: Room, cuts: Cuts) -> PlanError:
    """The same refusal, with a budget that was tried: with more room, groups may be placed otherwise and need more yet."""
    tier, named = refusal.lack
    needed, field = named, f"{_TIERS[tier]}_bytes"
    for _ in range(_TRIES):
        given: dict[str, Any] = {field: needed}
        try:
            _arrange(model, replace(plan, **given), world_size, replace(room, **given), cuts)
        except PlanError as again:
            if again.lack[0] != tier or again.lack[1] <= needed:
                break  # of another tier there is too little, too
            needed = again.lack[1]
        else:
            break
    error = PlanError(str(refusal).replace(f"{field}={named})", f"{field}={needed})"))
    error.lack = tier, needed
    return error


def _arrange(model: nn.Module, plan: Plan, world_size: int, room: Room, cuts: Cuts) -> tuple[Planned, list[Sizes], list[Home]]:
    planned = plan_groups(model, plan, world_size, cuts)
    refusals: list[PlanError] = []
    total_bytes = sum(unit.nbytes for unit, _ in planned)
    limit_bytes = group_bytes(total_bytes, plan.budget_device_bytes)
    smaller = [size for size in _halves(group_bytes(total_bytes, None)) if size < limit_bytes]
    while True:
        sizes = sizes_of(planned, plan, world_size)
        homes = place(sizes, plan, room.device_bytes, room.host_bytes)
        try:
            check_fit(sizes, homes, plan, world_size, room)
        except PlanError as refusal:
            refusals.append(refusal)
        else:
            return planned, sizes, homes
        if not smaller:
            raise min(refusals, key=lambda refusal: refusal.lack)
        planned = plan_groups(model, plan, world_size, cuts, smaller.pop(0))


def _halves(nbytes: int) -> list[int]:
    """The sizes that are tried, whatever the budget is."""
    return [nbytes >> shift for shift in range(nbytes.bit_length())]
