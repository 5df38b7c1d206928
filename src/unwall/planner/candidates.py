"""The plans worth looking at, and what each would need. Pure decisions over a machine and a batch."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from unwall.planner.hardware import Hardware
from unwall.planner.job import Job, activation_bytes, make_job
from unwall.planner.memory import ACTIVATIONS, IGNORED, Terms, terms_of
from unwall.planner.outline import Outline
from unwall.planner.pace import pace_of
from unwall.planner.workload import Keeping, Workload
from unwall.plans import Plan
from unwall.runtime.resources import HOST_SHARE
from unwall.tiers.ledger import TierName
from unwall.tiers.sizes import format_bytes, readable_bytes

DEVICE_SHARE = 0.92
"""The share of a device's memory that a plan may count on: the rest is the runtime's, and lost between blocks."""

KEPT: tuple[Keeping, ...] = ("keep", "auto", "recompute")
"""What is tried for activations where nobody says. ``"auto"`` also moves inputs of blocks to the host."""


@dataclass(frozen=True, kw_only=True)
class Allowance:
    """What one rank may use, in bytes, and where its drives are."""

    device_bytes: int
    """The device's own, for states and activations."""
    device_budget_bytes: int | None
    """The same, where the user says how much."""
    host_bytes: int
    disk_bytes: int
    directory: str | None
    together: bool
    """Device and host are the same memory."""
    host_given: bool = False
    """The user has said what the host may hold."""
    disk_given: bool = False
    """The same for the disk."""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A plan that was not yet tried on the model."""

    name: str
    """What it does, in words."""
    fields: dict[str, Any]
    workload: Workload
    budgeted: bool
    """The device budget is what the activations leave."""
    order: int = 0
    """The simpler the placement, the lower."""


@dataclass(frozen=True)
class Short:
    """What a tier lacks."""

    tier: TierName
    needed_bytes: int
    room_bytes: int

    def __str__(self) -> str:
        needed, there = format_bytes(self.needed_bytes), format_bytes(self.room_bytes)
        return f"needs {needed} on the {self.tier}, there are {there} per rank"


def allowance_of(
    hardware: Hardware,
    device_bytes: int | None = None,
    host_bytes: int | None = None,
    disk_bytes: int | None = None,
    directory: str | None = None,
) -> Allowance:
    """What a rank has of a machine, with the user's budgets (per rank, as in ``Plan``) instead where given."""
    share = hardware.devices_per_node
    disk = hardware.disk_bytes // share if disk_bytes is None else disk_bytes
    return Allowance(
        device_bytes=int(hardware.device_bytes * DEVICE_SHARE),
        device_budget_bytes=device_bytes,
        host_bytes=int(hardware.host_bytes * HOST_SHARE) // share if host_bytes is None else host_bytes,
        disk_bytes=disk if directory is not None else 0,
        directory=directory,
        together=hardware.is_host,
        host_given=host_bytes is not None,
        disk_given=disk_bytes is not None,
    )


def workloads(per_rank: int, whole: Workload, kept: Sequence[Keeping], least_passes: int = 1) -> Iterator[Workload]:
    """Ways to compute ``per_rank`` samples: in one pass or several (``least_passes``, or a multiple of it), activations kept or
    not. ``whole`` says the rest."""
    most = per_rank // least_passes
    sizes = [size for size in range(most, 0, -1) if most % size == 0]
    for activations in kept:
        for size in sizes:
            yield dataclasses.replace(whole, batch=size, passes=per_rank // size, activations=activations)


def placements(ranks: int, allowance: Allowance) -> Iterator[tuple[str, dict[str, Any], bool]]:
    """(name, fields of the plan, whether the device budget matters), the fastest kinds first."""
    for stage in (0, 1, 2, 3) if ranks > 1 else (3,):
        yield (
            f"{_stage(stage, ranks)}everything on the device",
            {"stage": stage, "params": "device", "optimizer": "device"},
            False,
        )
    last = _stage(3, ranks)
    yield f"{last}as much as fits on the device, the rest on the host", {"stage": 3}, True
    stage = 2 if ranks > 1 else 3
    yield (
        f"{_stage(stage, ranks)}parameters on the device, optimizer on the host",
        {"stage": stage, "params": "device", "optimizer": "host"},
        False,
    )
    yield f"{last}everything on the host", {"stage": 3, "params": "host", "optimizer": "host"}, True
    if allowance.directory is not None and allowance.disk_bytes:
        spill = {"stage": 3, "disk": allowance.directory}
        yield f"{last}device and host filled, the rest on disk", spill, True
        yield f"{last}everything on disk", spill | dict.fromkeys(("params", "grads", "optimizer"), "disk"), True


def _stage(stage: int, ranks: int) -> str:
    return f"stage {stage}, " if ranks > 1 else ""


def candidates(
    ranks: int,
    per_rank: int,
    whole: Workload,
    allowance: Allowance,
    kept: Sequence[Keeping] = KEPT,
    tiles: int | None = None,
    least_passes: int = 1,
) -> Iterator[Candidate]:
    """Everything worth a look. ``tiles``: as in ``Plan``."""
    more = {} if tiles is None else {"tiles": tiles}
    for order, (name, fields, budgeted) in enumerate(placements(ranks, allowance)):
        for load in workloads(per_rank, whole, kept, least_passes):
            yield Candidate(name=name, fields=fields | more, workload=load, budgeted=budgeted, order=order)


def build(
    candidate: Candidate, outline: Outline, ranks: int, allowance: Allowance, dtype: torch.dtype, hardware: Hardware
) -> tuple[Job, Terms]:
    """The candidate on the model, with the budgets that it is judged by. It need not fit: see :func:`shortage`."""
    job, terms = _build(candidate, outline, ranks, allowance, dtype, hardware, readable_bytes)
    device = _budgeted_on_device(job, terms)
    missed = device > (job.plan.budget_device_bytes or 0) or sum(terms["host"].values()) > (job.plan.budget_host_bytes or 0)
    if missed and shortage(terms, allowance) is None:  # by the rounding alone
        return _build(candidate, outline, ranks, allowance, dtype, hardware, int)
    return job, terms


def _budgeted_on_device(job: Job, terms: Terms) -> int:
    """What ``device_bytes`` of a plan is about: states and, where that is left to the engine, activations."""
    beside = (IGNORED,) if job.plan.activations == "auto" else (ACTIVATIONS, IGNORED)
    return sum(nbytes for name, nbytes in terms["device"].items() if name not in beside)


def _build(
    candidate: Candidate,
    outline: Outline,
    ranks: int,
    allowance: Allowance,
    dtype: torch.dtype,
    hardware: Hardware,
    rounded: Callable[[int], int],
) -> tuple[Job, Terms]:
    """``rounded``: what budgets are written as."""
    load = candidate.workload
    if load.activations == "auto":
        spare, host = _there(allowance) - outline.ignored_bytes, allowance.host_bytes
    else:
        spare, host = device_room(candidate, outline, allowance), host_room(candidate, outline, allowance)
    fields = {**candidate.fields, "device_bytes": rounded(max(1, spare)), "host_bytes": rounded(allowance.host_bytes)}
    if "disk" in fields:
        fields["disk_bytes"] = rounded(allowance.disk_bytes)
    if load.sequence_tiles > 1:
        fields["sequence_tiles"] = load.sequence_tiles
    plan = Plan(compute_dtype=dtype, activations=load.activations, passes=load.passes, ignore=outline.ignore, **fields)
    room = plan.budget_device_bytes if load.activations == "auto" else spare
    job = make_job(outline, plan, ranks, load, room, host, pace_of(hardware, dtype))
    return job, terms_of(job)


def host_room(candidate: Candidate, outline: Outline, allowance: Allowance) -> int:
    """What activation checkpoints leave for states."""
    return max(0, allowance.host_bytes - activation_bytes(outline, candidate.workload)[1])


def _there(allowance: Allowance) -> int:
    """Of the device."""
    there, given = allowance.device_bytes, allowance.device_budget_bytes
    return there if given is None else min(there, given)


def device_room(candidate: Candidate, outline: Outline, allowance: Allowance) -> int:
    """What activations leave for states, as few of them as possible where that is left to the engine; less than nothing where
    they alone are too much."""
    taken, _ = activation_bytes(outline, candidate.workload)
    return _there(allowance) - taken - outline.ignored_bytes


def shortage(terms: Terms, allowance: Allowance) -> Short | None:
    """The first tier that is too small, or None where the job fits."""
    needed: dict[TierName, int] = {tier: sum(found.values()) for tier, found in terms.items()}
    if allowance.device_budget_bytes is not None and needed["device"] > allowance.device_budget_bytes:
        return Short("device", needed["device"], allowance.device_budget_bytes)
    if allowance.host_given and needed["host"] > allowance.host_bytes:
        return Short("host", needed["host"], allowance.host_bytes)
    if allowance.together:
        needed["device"] += needed["host"]
        needed["host"] = 0
    if needed["device"] > allowance.device_bytes:
        return Short("device", needed["device"], allowance.device_bytes)
    if needed["host"] > allowance.host_bytes:
        return Short("host", needed["host"], allowance.host_bytes)
    return Short("disk", needed["disk"], allowance.disk_bytes) if needed["disk"] > allowance.disk_bytes else None
