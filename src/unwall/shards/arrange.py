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

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from torch import nn

from unwall.plans import Plan, PlanError
from unwall.shards.build import Room, check_fit, compute_dtype, fp32_names, sizes_of
from unwall.shards.grouping import BUDGET_SHARE, Cuts, group_bytes, uncut
from unwall.shards.groupings import Groupings, Planned
from unwall.shards.home import Home, Sizes
from unwall.shards.placement import place
from unwall.shards.tiles import forced, tileable
from unwall.shards.working import working_bytes
from unwall.tiers.sizes import format_bytes

_TIERS = ("device", "host", "disk")
_TRIES = 16
Arranged = tuple[Planned, list[Sizes], list[Home]]


def arrange(model: nn.Module, plan: Plan, world_size: int, room: Room, cuts: Cuts = uncut, replicas: int = 1) -> Arranged:
    """The groups of a model, what they take, and a home for each. PlanError, with the numbers and the nearest plan that would
    fit, before anything is allocated.

    ``room``: what the plan says, or what the machine has. ``replicas``: so many times ``world_size`` ranks have the model.
    """
    cuts = forced(model, plan) if cuts is uncut else cuts
    search = _Search(model, plan, world_size, replicas)
    try:
        return search.fitting(plan, room, cuts)
    except PlanError as refusal:
        if not refusal.lack[1]:
            raise
        raise search.tried(refusal, plan, room, cuts) from None


def fitting(model: nn.Module, plan: Plan, world_size: int, room: Room, cuts: Cuts) -> Arranged:
    """The same without a search for a budget that would do."""
    return _Search(model, plan, world_size).fitting(plan, room, cuts)


class _Search:
    """Groups and homes for one model, under one budget after the other. Plans differ in nothing but budgets."""

    def __init__(self, model: nn.Module, plan: Plan, world_size: int, replicas: int = 1) -> None:
        self._model, self._world_size, self._replicas = model, world_size, replicas
        self._groupings = Groupings(model, plan, world_size)
        self._sizes: dict[int, list[Sizes]] = {}

    def fitting(self, plan: Plan, room: Room, cuts: Cuts) -> Arranged:
        """See [Note: as many tiles as needed]."""
        found, refusal = None, None
        try:
            found = self._arrange(plan, room, cuts)
            if _streams_on(found, plan, room):
                return found
        except PlanError as error:
            refusal = error
        own = refusal is None or (refusal.lack[1] and _TIERS[refusal.lack[0]] == "device")
        for tiled in self._tilings(plan, room) if own and plan.tiles is None and cuts is uncut else ():
            try:
                again = self._arrange(plan, room, tiled)
            except PlanError as error:
                refusal = error if refusal is not None and error.lack < refusal.lack else refusal
                continue
            if _streams_on(again, plan, room):
                return again
        if found is not None:
            return found
        assert refusal is not None
        raise _naming_the_largest(refusal, self._model, plan) if own and refusal.lack[1] else refusal

    def tried(self, refusal: PlanError, plan: Plan, room: Room, cuts: Cuts) -> PlanError:
        """The same refusal, with a budget that was tried: with more room, groups may be placed otherwise and need more yet."""
        tier, named = refusal.lack
        needed, field = named, f"{_TIERS[tier]}_bytes"
        for _ in range(_TRIES):
            given: dict[str, Any] = {field: needed}
            try:
                self.fitting(replace(plan, **given), replace(room, **given), cuts)
            except PlanError as again:
                if again.lack[0] != tier or again.lack[1] <= needed:
                    break  # of another tier there is too little, too
                needed = again.lack[1]
            else:
                break
        error = PlanError(str(refusal).replace(f"{field}={named})", f"{field}={needed})"))
        error.lack = tier, needed
        return error

    def _tilings(self, plan: Plan, room: Room) -> Iterator[Cuts]:
        return self._groupings.tilings(plan.budget_device_bytes or room.device_bytes or 0)

    def _arrange(self, plan: Plan, room: Room, cuts: Cuts) -> Arranged:
        refusals: list[PlanError] = []
        planned = self._groupings.planned(cuts, plan.budget_device_bytes)
        total_bytes = sum(unit.nbytes for unit, _ in planned)
        limit_bytes = group_bytes(total_bytes, plan.budget_device_bytes)
        smaller = [size for size in _halves(group_bytes(total_bytes, None)) if size < limit_bytes]
        for size in [None, *smaller]:
            before, planned = planned, self._groupings.planned(cuts, plan.budget_device_bytes, size)
            if refusals and planned is before:
                continue
            sizes = self._sizes_of(planned, plan)
            homes = place(sizes, plan, room.device_bytes, room.host_bytes)
            try:
                check_fit(sizes, homes, plan, self._world_size, room)
            except PlanError as refusal:
                refusals.append(refusal)
            else:
                return planned, sizes, homes
        raise min(refusals, key=lambda refusal: refusal.lack)

    def _sizes_of(self, planned: Planned, plan: Plan) -> list[Sizes]:
        if id(planned) not in self._sizes:
            self._sizes[id(planned)] = sizes_of(planned, plan, self._world_size, self._replicas)
        return self._sizes[id(planned)]


def _streams_on(arranged: Arranged, plan: Plan, room: Room) -> bool:
    """Whether what comes and goes fits the card. Where the plan names a budget, ``check_fit`` has asked that."""
    if plan.budget_device_bytes is not None or room.device_bytes is None:
        return True
    return working_bytes(arranged[1], arranged[2]) <= room.device_bytes


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


def _halves(nbytes: int) -> list[int]:
    """The sizes that are tried, whatever the budget is."""
    return [nbytes >> shift for shift in range(nbytes.bit_length())]
