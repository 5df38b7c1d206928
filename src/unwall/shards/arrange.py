"""Groups and homes for a model that fit the budgets, if there are any.

[Note: smaller groups]
Groups are at most an eighth of ``device_bytes`` (shards/grouping.py), so a larger budget makes larger groups, of which more
must be on the device at once. Where that does not fit, smaller groups may: half as large, a quarter, and so on, to single
modules. So a budget that is larger than an accepted one is accepted, too.

[Note: as many tiles as needed]
Where that does not fit either, single parameters are too large. Those that can be read in tiles ([Note: tiles] in
shards/tiles.py) are cut into tiles of at most an eighth of ``device_bytes``, half of that, and so on, until it fits. On an
accelerator without ``device_bytes`` the same happens where what comes and goes would take more than the card has to spare.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from unwall.plans import Plan, PlanError
from unwall.shards.build import Room, check_fit, compute_dtype, fp32_names, plan_groups, sizes_of
from unwall.shards.grouping import BUDGET_SHARE, Cuts, Unit, group_bytes, uncut
from unwall.shards.layout import Layout
from unwall.shards.placement import Home, Sizes, place, working_bytes
from unwall.shards.tiles import cut_rows, forced, most_tiles, tileable
from unwall.tiers.sizes import format_bytes

Planned = list[tuple[Unit, Layout]]
_TIERS = ("device", "host", "disk")
_TRIES = 16
_SMALLEST_TILE_BYTES = 64 << 10
_MOST_TILES = 4096
Arranged = tuple[Planned, list[Sizes], list[Home]]


def arrange(model: nn.Module, plan: Plan, world_size: int, room: Room, cuts: Cuts = uncut) -> Arranged:
    """The groups of a model, what they take, and a home for each. PlanError, with the numbers and the nearest plan that would
    fit, before anything is allocated.

    ``room``: what the plan says, or what the machine has.
    """
    cuts = forced(model, plan) if cuts is uncut else cuts
    try:
        return fitting(model, plan, world_size, room, cuts)
    except PlanError as refusal:
        if not refusal.lack[1]:
            raise
        raise _tried(refusal, model, plan, world_size, room, cuts) from None


def fitting(model: nn.Module, plan: Plan, world_size: int, room: Room, cuts: Cuts) -> Arranged:
    """The same without a search for a budget that would do. See [Note: as many tiles as needed]."""
    found, refusal = None, None
    try:
        found = _arrange(model, plan, world_size, room, cuts)
        if _streams_on(found, plan, room):
            return found
    except PlanError as error:
        refusal = error
    own = refusal is None or (refusal.lack[1] and _TIERS[refusal.lack[0]] == "device")
    for tiled in tilings(model, plan, room) if own and plan.tiles is None and cuts is uncut else ():
        try:
            again = _arrange(model, plan, world_size, room, tiled)
        except PlanError as error:
            refusal = error if refusal is not None and error.lack < refusal.lack else refusal
            continue
        if _streams_on(again, plan, room):
            return again
    if found is not None:
        return found
    assert refusal is not None
    raise _naming_the_largest(refusal, model, plan) if own and refusal.lack[1] else refusal


def _streams_on(arranged: Arranged, plan: Plan, room: Room) -> bool:
    """Whether what comes and goes fits the card. Where the plan names a budget, ``check_fit`` has asked that."""
    if plan.budget_device_bytes is not None or room.device_bytes is None:
        return True
    return working_bytes(arranged[1], arranged[2]) <= room.device_bytes


def tilings(model: nn.Module, plan: Plan, room: Room) -> Iterator[Cuts]:
    """Cuts into smaller and smaller tiles, as far as there is something to cut."""
    able, kept = tileable(model), fp32_names(model)
    budget = plan.budget_device_bytes or room.device_bytes or 0
    total = sum(param.numel() * param.element_size() for param in able.values())
    # Powers of two down to the same smallest one, whatever the budget is: less room is never accepted where more was refused.
    smallest = max(_SMALLEST_TILE_BYTES, 1 << (total // _MOST_TILES).bit_length())
    limit = max(smallest, 1 << max(1, budget // BUDGET_SHARE).bit_length() - 1)
    while limit >= smallest and total:

        def cuts(name: str, param: nn.Parameter, limit: int = limit) -> Sequence[int]:
            if id(param) not in able:
                return ()
            nbytes = param.numel() * compute_dtype(plan, name, param, kept).itemsize
            return cut_rows(param.shape, min(-(-nbytes // limit), most_tiles(param.shape)))

        yield cuts
        limit //= 2


def _naming_the_largest(refusal: PlanError, model: nn.Module, plan: Plan) -> PlanError:
    """The same refusal, and what stands in the way if it is one parameter that cannot be read in tiles."""
    able, kept = tileable(model), fp32_names(model)
    others = [(name, param) for name, param in model.named_parameters() if id(param) not in able]
    sizes = {name: param.numel() * compute_dtype(plan, name, param, kept).itemsize for name, param in others}
    name = max(sizes, key=lambda name: sizes[name], default="")
    if not name or sizes[name] * BUDGET_SHARE < (plan.budget_device_bytes or 0):
        return refusal
    error = PlanError(
        f"{refusal}. The largest parameter that cannot be read in tiles is {name} ({format_bytes(sizes[name])}): its module "
        "needs it whole, together with its gradient; weights of Linear, Embedding and stacked experts are tiled"
    )
    error.lack = refusal.lack
    return error


def _tried(refusal: PlanError, model: nn.Module, plan: Plan, world_size: int, room: Room, cuts: Cuts) -> PlanError:
    """The same refusal, with a budget that was tried: with more room, groups may be placed otherwise and need more yet."""
    tier, named = refusal.lack
    needed, field = named, f"{_TIERS[tier]}_bytes"
    for _ in range(_TRIES):
        given: dict[str, Any] = {field: needed}
        try:
            fitting(model, replace(plan, **given), world_size, replace(room, **given), cuts)
        except PlanError as again:
            if again.lack[0] != tier or again.lack[1] <= needed:
                break  # of another tier there is too little, too
            needed = again.lack[1]
        else:
            break
    error = PlanError(str(refusal).replace(f"{field}={named})", f"{field}={needed})"))
    error.lack = tier, needed
    return error


def _arrange(model: nn.Module, plan: Plan, world_size: int, room: Room, cuts: Cuts) -> Arranged:
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
