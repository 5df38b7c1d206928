"""Groups and homes for a model that fit the budgets, if there are any.

[Note: smaller groups]
Groups are at most an eighth of ``device_bytes`` (shards/grouping.py), so a larger budget makes larger groups, of which more
must be on the device at once. Where that does not fit, smaller groups may: half as large, a quarter, and so on, to single
modules. So a budget that is larger than an accepted one is accepted, too.
"""

from torch import nn

from unwall.plans import Plan, PlanError
from unwall.shards.build import Room, check_fit, plan_groups, sizes_of
from unwall.shards.grouping import Cuts, Unit, group_bytes, uncut
from unwall.shards.layout import Layout
from unwall.shards.placement import Home, Sizes, place

Planned = list[tuple[Unit, Layout]]


def arrange(
    model: nn.Module, plan: Plan, world_size: int, room: Room, cuts: Cuts = uncut
) -> tuple[Planned, list[Sizes], list[Home]]:
    """The groups of a model, what they take, and a home for each. PlanError, with the numbers and the nearest plan that would
    fit, before anything is allocated.

    ``room``: what the plan says, or what the machine has.
    """
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
