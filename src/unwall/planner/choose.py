"""Choosing: the fastest plan that fits, those that lost and why, and what would help when nothing fits."""

import dataclasses
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from unwall.planner.activations import Activations
from unwall.planner.candidates import KEPT, Allowance, Candidate, Short, allowance_of, build, candidates, device_room, shortage
from unwall.planner.fewer_bytes import with_fewer_bytes
from unwall.planner.hardware import Hardware
from unwall.planner.job import activation_bytes
from unwall.planner.mesh_cost import MeshCost
from unwall.planner.outline import Outline
from unwall.planner.pace import dtype_name
from unwall.planner.predict import Prediction, kept_share
from unwall.planner.search import AS_FAST, Search, Tried, Verdict
from unwall.planner.words import seconds
from unwall.planner.workload import Keeping, Workload
from unwall.plans import Plan, PlanError
from unwall.tiers.ledger import TierName
from unwall.tiers.sizes import format_bytes

Objective = Literal["speed", "memory"]
_KEPT_WORDS = {"keep": "kept", "auto": "as few as possible", "recompute": "recomputed", "host": "with their inputs on the host"}


class DoesNotFitError(PlanError):
    """Nothing fits. Says what is missing and what would do."""


@dataclass(frozen=True)
class Kept:
    """What one choice for activations takes, all else alike."""

    activations: Keeping
    device_bytes: int
    """Of activations alone, as are the next."""
    host_bytes: int
    step_s: float | None
    """As simulated; None where it does not fit, or nobody asked."""
    reason: str = ""
    """Why it does not fit."""


@dataclass(frozen=True, kw_only=True)
class ChosenPlan(Plan):
    """A plan with what is known about it. ``print`` shows it; ``unwall.shard(model, plan)`` takes it."""

    name: str = field(default="", compare=False)
    """What it does, in words."""
    model: str = field(default="", compare=False)
    model_params: int = field(default=0, compare=False)
    """Parameters of the model, in all."""
    machine: str = field(default="", compare=False)
    rooms: dict[TierName, int] = field(default_factory=dict, compare=False)
    """Bytes per tier that the plan was judged by: the machine's, or the user's budgets."""
    ranks: int = field(default=1, compare=False)
    workload: Workload = field(default_factory=Workload, compare=False)
    """Samples of one pass, passes before a step, and whether to recompute: the caller's loop does that."""
    prediction: Prediction | None = field(default=None, compare=False, repr=False)
    kept: Activations | None = field(default=None, compare=False, repr=False)
    """What becomes of activations."""
    kept_otherwise: tuple[Kept, ...] = field(default=(), compare=False, repr=False)
    """What each choice for activations would take, with the same placement."""
    weight_tiles: int = field(default=1, compare=False)
    """Into how many tiles the weight that is cut most is cut."""
    meshes: tuple[MeshCost, ...] = field(default=(), compare=False, repr=False)
    """With several ranks: ZeRO alone, and mixes with tensor and pipeline parallelism, the best first."""
    runners_up: tuple[Verdict, ...] = field(default=(), compare=False, repr=False)
    advice: tuple[str, ...] = field(default=(), compare=False)

    def __str__(self) -> str:
        from unwall.planner.report import as_text  # rich is only needed to print

        return as_text(self)

    def to_plan(self) -> Plan:
        """Only the plan."""
        return Plan(**{item.name: getattr(self, item.name) for item in dataclasses.fields(Plan)})


def choose(
    outline: Outline,
    hardware: Hardware,
    *,
    ranks: int | None = None,
    batch: int | None = None,
    seq: int = 1024,
    clip: bool = True,
    device_bytes: int | None = None,
    host_bytes: int | None = None,
    disk_bytes: int | None = None,
    directory: str | None = None,
    compute_dtype: torch.dtype | None = None,
    objective: Objective = "speed",
    kept: tuple[Keeping, ...] = KEPT,
    tiles: int | None = None,
    sequence_tiles: int | None = None,
    compare: bool = False,
    states: str = "exact",
    least_passes: int = 1,
) -> ChosenPlan:
    """The best plan that fits, or a PlanError that says what would. See [Note: what is tried] in search.py.

    ``batch``: samples per step, over all ranks. The budgets are per rank, as in ``Plan``, and so are ``tiles`` and
    ``sequence_tiles``; None of the latter: only where activations of one sample do not fit otherwise. ``kept``: what may become
    of activations. ``compare``: each of those is predicted for the placement that was chosen.
    ``states``: as in ``Plan``. ``least_passes``: there are so many before a step, or a multiple; it divides a rank's batch.
    """
    check_objective(objective)
    ranks = hardware.devices if ranks is None else ranks
    per_rank = _per_rank(batch, ranks)
    if isinstance(least_passes, bool) or not isinstance(least_passes, int) or least_passes < 1 or per_rank % least_passes:
        raise PlanError(f"least_passes is a divisor of the {per_rank} samples of a rank, got {least_passes!r}")
    if states not in ("exact", "lean"):
        raise PlanError(f"states is 'exact' or 'lean', got {states!r}")
    dtype = dtype_of(hardware, torch.bfloat16 if states == "lean" and compute_dtype is None else compute_dtype)
    if ranks > 1 and not hardware.ceilings(dtype_name(dtype)).collective_bytes_per_s:
        raise PlanError(f"{ranks} ranks, but {hardware.name} says nothing about what lies between them: collective_bytes_per_s")
    allowance = allowance_of(hardware, device_bytes, host_bytes, disk_bytes, directory)
    smallest: list[Candidate] = []
    for cut in _cuts(outline, sequence_tiles):
        whole = Workload(seq=seq, clip=clip, sequence_tiles=cut, item_bytes=dtype.itemsize)
        listed = list(candidates(ranks, per_rank, whole, allowance, kept, tiles, least_passes))
        if states != "exact":
            listed = [dataclasses.replace(found, fields={**found.fields, "states": states}) for found in listed]
        search = Search(outline, hardware, ranks, allowance, dtype)
        search.run(listed, stop_early=objective == "speed", bounds=not compare)
        smallest.append(listed[-1])
        if search.tried or (cut == 1 and not search.starved):
            break
    tried, lost = search.tried, list(search.lost.values())
    if not tried:
        raise DoesNotFitError(_nothing_fits(outline, hardware, ranks, allowance, dtype, smallest[0]))
    best = _best(tried, objective)
    for found in tried:
        if found is not best:
            lost.append(
                Verdict(found.candidate.name, found.job.workload, _why(found, best, objective), found.prediction.step_s)
            )
    named = {found.candidate.name for found in tried}
    lost = [verdict for verdict in lost if verdict.name not in named or verdict.step_s is not None]
    lost.sort(key=lambda verdict: (verdict.step_s is None, verdict.step_s or 0.0))
    plan = {item.name: getattr(best.job.plan, item.name) for item in dataclasses.fields(Plan)}
    return ChosenPlan(
        **plan, name=best.candidate.name, model=outline.description.name,
        model_params=outline.description.params, rooms=_rooms(hardware, allowance), machine=hardware.name, ranks=ranks,
        workload=best.job.workload, prediction=best.prediction, runners_up=tuple(lost),
        advice=(*_advice(best), *_second_copy(search, best), *with_fewer_bytes(search, best)),
        kept=best.job.activations, kept_otherwise=_otherwise(search, best, kept, compare), weight_tiles=best.job.tiles,
    )  # fmt: skip


def _cuts(outline: Outline, given: int | None) -> tuple[int, ...]:
    """In how many sequence tiles MLPs may run."""
    inside = any(part.inside_numel for part in outline.description.parts)
    return (given,) if given is not None else (1, 2, 4, 8, 16, 32, 64) if inside else (1,)


def _otherwise(search: Search, best: Tried, kept: tuple[Keeping, ...], compare: bool) -> tuple[Kept, ...]:
    """What each way to treat activations takes with the placement that was chosen."""
    found = []
    for each in (*kept, *(("host",) if compare and "host" not in kept else ())):
        place = dataclasses.replace(best.candidate, workload=dataclasses.replace(best.candidate.workload, activations=each))
        tried = [other for other in search.tried if other.candidate == place]
        made = tried[0] if tried else search.look(place) if compare else ""
        if isinstance(made, Tried):
            found.append(Kept(each, *made.job.activation_bytes(), made.prediction.step_s))
        else:
            found.append(Kept(each, *activation_bytes(search.outline, place.workload), None, made))
    return tuple(found)


def check_objective(objective: str) -> None:
    """PlanError for one that is not known."""
    if objective not in ("speed", "memory"):
        raise PlanError(f"objective is speed or memory, got {objective!r}")


def _per_rank(batch: int | None, ranks: int) -> int:
    batch = ranks if batch is None else batch
    for name, value in (("batch", batch), ("ranks", ranks)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise PlanError(f"{name} must be a whole number above 0, got {value!r}")
    if batch % ranks:
        nearest = max(1, round(batch / ranks)) * ranks
        raise PlanError(f"a batch of {batch} samples cannot be dealt out evenly to {ranks} ranks; {nearest} can")
    return batch // ranks


def dtype_of(hardware: Hardware, asked: torch.dtype | None) -> torch.dtype:
    """What forward and backward compute in: what is asked for, or the fastest that the machine has."""
    if asked is not None:
        hardware.flops_per_s(dtype_name(asked))
        return asked
    known = [dtype for dtype in (torch.bfloat16, torch.float16) if dtype_name(dtype) in hardware.matmul_flops_per_s]
    return known[0] if known else torch.float32


def _best(tried: list[Tried], objective: Objective) -> Tried:
    """The fastest; of those as fast (as far as a prediction can tell) the simplest."""
    if objective == "memory":
        return min(tried, key=lambda found: (found.prediction.tier_bytes("device"), found.prediction.step_s))
    least = min(found.prediction.step_s for found in tried)
    near = [found for found in tried if found.prediction.step_s <= least * AS_FAST]
    return min(near, key=lambda found: (found.candidate.order, found.prediction.step_s))


def _why(found: Tried, best: Tried, objective: Objective) -> str:
    if objective == "memory":
        more = found.prediction.tier_bytes("device") - best.prediction.tier_bytes("device")
        return f"{format_bytes(more)} more on the device"
    ratio = found.prediction.step_s / best.prediction.step_s
    busiest = max(found.prediction.busy_s, key=lambda queue: found.prediction.busy_s[queue])
    if ratio <= AS_FAST:
        return "as fast, and less simple"
    return f"{ratio:.2f} times the time; most of it {busiest}"


def _rooms(hardware: Hardware, allowance: Allowance) -> dict[TierName, int]:
    device = hardware.device_bytes if allowance.device_budget_bytes is None else allowance.device_budget_bytes
    host = allowance.host_bytes if allowance.host_given else hardware.host_bytes // hardware.devices_per_node
    return {"device": device, "host": host, "disk": allowance.disk_bytes}


def _advice(best: Tried) -> list[str]:
    load = best.job.workload
    samples = f"{load.batch} sample{'s' * (load.batch != 1)} per rank"
    if load.passes > 1:
        return [f"run {load.passes} passes of {samples}, then step: their gradients add up"]
    return [f"run one pass of {samples}, then step"]


def _second_copy(search: Search, best: Tried) -> list[str]:
    """Where parameters are gathered again from other nodes, and keeping them once more in each node would be faster."""
    inside, ranks = search.hardware.devices_per_node, search.ranks
    if not 1 < inside < ranks or ranks % inside or best.job.plan.stage != 3 or kept_share(best.job) == 1.0:
        return []
    fields = {**best.candidate.fields, "replica": "node", "node_ranks": inside}
    made = search.look(dataclasses.replace(best.candidate, fields=fields))
    if not isinstance(made, Tried) or made.prediction.step_s * AS_FAST > best.prediction.step_s:
        return []
    less = seconds(made.prediction.step_s)
    return [f"with replica='node', node_ranks={inside} a step would take {less}: backward gathers inside the node"]


def _nothing_fits(
    outline: Outline, hardware: Hardware, ranks: int, allowance: Allowance, dtype: torch.dtype, last: Candidate
) -> str:
    from unwall.planner.remedies import remedies

    # Everything on the slowest tier there is asks least of the device, and leaves nothing to place group by group.
    lowest = "disk" if allowance.directory is not None and allowance.disk_bytes else "host"
    fields: dict[str, Any] = {"stage": 3, "params": lowest, "optimizer": lowest}
    fields |= {name: value for name, value in last.fields.items() if name == "tiles"}
    if lowest == "disk":
        fields |= {"grads": "disk", "disk": allowance.directory}
    smallest = last.workload
    place = Candidate(name="smallest", fields=fields, workload=smallest, budgeted=True)
    lacks: list[str] = []
    spare = device_room(place, outline, allowance)
    if spare <= 0:
        how = _KEPT_WORDS[smallest.activations]
        lacks.append(f"activations of one sample of {smallest.seq} tokens, {how}, leave no room on the device")
    else:
        lack: Short | None = shortage(build(place, outline, ranks, allowance, dtype, hardware)[1], allowance)
        lacks.append(str(lack) if lack is not None else "what is in use at once does not fit the device")
    helps = remedies(place, outline, hardware, ranks, allowance, dtype)
    listed = "; ".join(helps) if helps else "nothing that was looked for (more memory, more ranks, a disk, shorter samples)"
    many = f"{ranks} rank{'s' if ranks > 1 else ''}"
    return f"{outline.description.name} does not fit on {hardware.name} with {many}: {lacks[0]}. What would do: {listed}"
