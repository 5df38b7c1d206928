"""What is to be predicted: a model, a plan and a workload, as the engine would set them up on one rank."""

from collections import Counter
from dataclasses import dataclass, replace
from functools import cached_property

from unwall.optim.journals import group_journal_bytes
from unwall.optim.policy import Room as Ways
from unwall.optim.policy import Way, choose_ways
from unwall.planner.activations import Activations, activations_of, link_of
from unwall.planner.outline import Outline, Stretch
from unwall.planner.pace import Pace
from unwall.planner.workload import Keeping as Keeping
from unwall.planner.workload import Workload as Workload
from unwall.plans import Plan
from unwall.runtime.resources import STATE_SHARE
from unwall.schedule.activations import NO_LINK
from unwall.schedule.executor import REDUCES_IN_FLIGHT
from unwall.shards.build import Room, sizes_of
from unwall.shards.grouping import Unit, uncut
from unwall.shards.groupings import Planned
from unwall.shards.home import Home, Sizes, device_bytes_of, disk_bytes_of, host_bytes_of
from unwall.shards.layout import Layout
from unwall.shards.placement import place
from unwall.shards.working import host_working_bytes, working_bytes

MAX_PLACED = 2000
"""Groups that are still placed one by one: that takes the square of their number."""


@dataclass(frozen=True)
class Job:
    """One rank's part: the groups that the engine makes of the model, where each one lives, and what runs over them."""

    outline: Outline
    plan: Plan
    ranks: int
    workload: Workload
    planned: tuple[tuple[Unit, Layout], ...]
    sizes: tuple[Sizes, ...]
    homes: tuple[Home, ...]
    activations: Activations
    shadowed: tuple[int, ...] = ()
    """Groups with a second place for their states on the host, so that they can be updated before the step."""
    journaled: tuple[int, ...] = ()
    """Groups with a journal on the host instead."""

    @property
    def early(self) -> frozenset[int]:
        """Groups that are updated while backward runs."""
        if self.workload.update_in_backward:
            return frozenset(index for index, home in enumerate(self.homes) if home.tier == "host")
        return frozenset(self.shadowed + self.journaled)

    @cached_property
    def stretches(self) -> list[Stretch]:
        return self.outline.stretches([unit for unit, _ in self.planned])

    def held_bytes(self) -> dict[str, int]:
        """By tier, between passes; as the engine counts."""
        of = {"device": device_bytes_of, "host": host_bytes_of, "disk": disk_bytes_of}
        pairs = list(zip(self.sizes, self.homes, strict=True))
        return {tier: sum(count(*pair) for pair in pairs) for tier, count in of.items()}

    def activation_bytes(self) -> tuple[int, int]:
        """On the device and on the host."""
        return self.activations.device_bytes, self.activations.host_bytes

    @property
    def tiles(self) -> int:
        """Into how many tiles the parameter that is cut most is cut. 1: all are whole."""
        counts = Counter(id(entry.param) for unit, _ in self.planned if unit.is_part for entry in unit.entries)
        return max(counts.values(), default=1)

    @property
    def state_budget_bytes(self) -> int | None:
        """What the device may hold of parameters, gradients and states. None: no limit. With ``"auto"`` the plan's budget is
        for activations, too."""
        budget = self.plan.budget_device_bytes
        if budget is None or self.workload.activations != "auto":
            return budget
        return max(1, budget - self.activations.device_bytes - self.outline.ignored_bytes)


def activation_bytes(outline: Outline, load: Workload) -> tuple[int, int]:
    """On the device and on the host, of one rank; of ``"auto"`` the least that it can do with."""
    if load.activations == "auto":
        found = activations_of(outline.description, replace(load, activations="host"))
        return found.device_bytes, 0
    found = activations_of(outline.description, load)
    return found.device_bytes, found.host_bytes


def make_job(
    outline: Outline,
    plan: Plan,
    ranks: int,
    workload: Workload,
    device_room_bytes: int | None,
    host_room_bytes: int | None,
    pace: Pace | None = None,
) -> Job:
    """Groups and homes by the engine's own decisions; whether they fit is for the caller to see.

    The rooms are what this rank may use, where the plan itself says nothing: on the device for states or, where activations are
    decided for each block, for both. ``pace``: for that decision.
    """
    shared = workload.activations == "auto"
    of_states = device_room_bytes
    if shared and device_room_bytes is not None and not (pace is not None and pace.is_host):
        of_states = int(device_room_bytes * STATE_SHARE)  # as runtime/resources.py does
    planned = _planned(outline, plan, ranks, Room(of_states, host_room_bytes))
    sizes = sizes_of(planned, plan, ranks)
    homes = place(sizes, plan, of_states, host_room_bytes)
    shadowed, journaled = _ahead(sizes, homes, workload, host_room_bytes, journals=workload.journal and not plan.lean)
    room, link = None, NO_LINK
    if shared and device_room_bytes is not None:
        pairs = list(zip(sizes, homes, strict=True))
        least = sum(device_bytes_of(*pair) for pair in pairs) + working_bytes(sizes, homes)
        room = max(0, device_room_bytes - least - outline.ignored_bytes)
        if pace is not None:
            spare = 0
            if host_room_bytes is not None:
                spare = host_room_bytes - sum(host_bytes_of(*pair) for pair in pairs) - host_working_bytes(sizes, homes)
            fetched = sum(size.flat_bytes for size, home in pairs if home.params != "device") / ranks
            link = link_of(pace, room, spare, fetched)
    kept = activations_of(outline.description, workload, room, link, pace)
    return Job(outline, plan, ranks, workload, tuple(planned), tuple(sizes), tuple(homes), kept, shadowed, journaled)


def _planned(outline: Outline, plan: Plan, ranks: int, room: Room) -> Planned:
    """Groups, with tiles where ``shard`` would cut parameters: where what comes and goes is all that does not fit."""
    groupings = outline.groupings(plan, ranks)
    if plan.tiles is not None:
        return groupings.planned(groupings.forced(plan), plan.budget_device_bytes)
    whole = groupings.planned(uncut, plan.budget_device_bytes)
    largest = outline.largest_tileable_numel * plan.compute_dtype.itemsize
    if room.device_bytes is None or 4 * largest <= room.device_bytes or not _lacks_working(whole, plan, ranks, room):
        return whole
    for cuts in groupings.tilings(plan.budget_device_bytes or room.device_bytes):
        cut = groupings.planned(cuts, plan.budget_device_bytes)
        if plan.params == "auto" and len(cut) > MAX_PLACED:
            return whole
        if not _lacks_working(cut, plan, ranks, room):
            return cut
    return whole


def _lacks_working(planned: Planned, plan: Plan, ranks: int, room: Room) -> bool:
    """Whether states have their place, and what comes and goes has none."""
    sizes = sizes_of(planned, plan, ranks)
    homes = place(sizes, plan, room.device_bytes, room.host_bytes)
    held = sum(device_bytes_of(*pair) for pair in zip(sizes, homes, strict=True))
    return held <= (room.device_bytes or 0) < held + working_bytes(sizes, homes)


def shadow_bytes(size: Sizes) -> int:
    """What a second place for a group's states takes."""
    return size.shard_bytes + size.state_bytes


def planned_journal_bytes(size: Sizes) -> int:
    """What a journal of a group takes."""
    return group_journal_bytes(size.own_numel, runs=1)


def _ahead(
    sizes: list[Sizes], homes: list[Home], load: Workload, room_bytes: int | None, journals: bool
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The groups with a second place, and those with a journal, as far as the host has room, as ``optim/`` chooses them."""
    if load.clip or load.passes > 1 or load.update_in_backward:
        return (), ()
    held = sum(host_bytes_of(*pair) for pair in zip(sizes, homes, strict=True))
    left = float("inf") if room_bytes is None else room_bytes - held
    pairs = enumerate(zip(sizes, homes, strict=True))
    able = [index for index, (size, home) in pairs if home.tier == "host" and not home.on_disk and size.trainable]
    nothing = float("inf")
    rooms = [Ways(shadow_bytes(sizes[at]), planned_journal_bytes(sizes[at]) if journals else nothing) for at in able]
    # Those whose gradients are still on their way when backward ends are updated at the step.
    late = 0 if homes[0].tier == "device" else REDUCES_IN_FLIGHT
    ways = [(at, way) for at, way in zip(able, choose_ways(rooms, left), strict=True) if at >= late]
    return (
        tuple(index for index, way in ways if way is Way.SHADOW),
        tuple(index for index, way in ways if way is Way.JOURNAL),
    )
