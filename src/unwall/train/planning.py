"""Which plan a run follows, and the line that says what to expect of it, before anything is loaded."""

import dataclasses
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from unwall.planner.answer import answer, plan_fields
from unwall.planner.candidates import DEVICE_SHARE
from unwall.planner.choose import ChosenPlan
from unwall.planner.hardware import Hardware
from unwall.planner.job import Keeping, Workload, activation_bytes, make_job
from unwall.planner.outline import Outline
from unwall.planner.predict import predict
from unwall.planner.probe import Progress
from unwall.planner.public import machine_of
from unwall.planner.public import plan as choose
from unwall.planner.read import read_dtype
from unwall.planner.traffic import with_nodes
from unwall.planner.words import count
from unwall.plans import Plan, PlanError
from unwall.tiers.ledger import BudgetError, TierName
from unwall.tiers.sizes import format_bytes
from unwall.train.errors import TrainError
from unwall.train.measuring import outwait_measuring
from unwall.train.options import Options
from unwall.train.start import Start
from unwall.train.world import size_of_world

NETWORK_BYTES_PER_S = 1.25e9
"""Between nodes, where nobody measured it: 10 Gbit/s."""


@dataclass(frozen=True)
class Decision:
    """What rank 0 decided for all."""

    plan: Plan
    passes: int
    """Forward and backward passes per step, on each rank."""
    line: str
    """The answer."""
    chosen: ChosenPlan | None = field(default=None, repr=False)
    machine: Hardware | None = field(default=None, repr=False)

    @property
    def bound_s(self) -> float | None:
        """The least a step can take."""
        found = None if self.chosen is None else self.chosen.prediction
        return None if found is None else found.bound.step_s

    def to_dict(self) -> dict[str, Any]:
        """For run.json."""
        found = None if self.chosen is None else self.chosen.prediction
        shown = ChosenPlan(**{item.name: getattr(self.plan, item.name) for item in dataclasses.fields(Plan)})
        return {
            "answer": self.line,
            "plan": plan_fields(shown),
            "prediction": None if found is None else found.to_dict(),
            "machine": None if self.machine is None else self.machine.to_dict(),
            "passes": self.passes,
        }


def decide(options: Options, outline: Outline, progress: Progress | None = None, start: Start | None = None) -> Decision:
    """Chooses a plan, or judges the one of a file. PlanError says what would fit where nothing does."""
    _, ranks, local = size_of_world()
    per_rank = sequences_per_rank(options, ranks)
    if options.plan != "auto":
        given = _plan_of(options, per_rank)
        machine = _machine(given.directories, ranks, local, progress, given.compute_dtype, start)
        return _given(options, given, outline, machine, ranks, per_rank)
    machine = _machine(() if options.disk is None else (Path(options.disk),), ranks, local, progress, None, start)
    found = choose(
        outline, batch=options.batch, seq=options.seq, hardware=machine, ranks=ranks, disk=options.disk,
        device_bytes=options.device_bytes, host_bytes=options.host_bytes, clip=options.clip > 0, states=options.states,
        least_passes=options.accumulate or 1,
    )  # fmt: skip
    if options.disk is None and found.disk is not None:  # a machine that was measured with a disk once
        raise TrainError("the plan needs a disk: give a directory on a fast drive with --disk DIR")
    plan = dataclasses.replace(found.to_plan(), reduce_op="sum")
    return Decision(plan, plan.passes, answer(found), found, machine)


def sequences_per_rank(options: Options, ranks: int) -> int:
    """Of one step."""
    share = ranks * (options.accumulate or 1)
    if options.batch % share:
        raise TrainError(
            f"--batch {options.batch} cannot be divided evenly over {ranks} ranks{_times(options.accumulate)}: use a "
            f"multiple of {share}"
        )
    return options.batch // ranks


def _times(accumulate: int | None) -> str:
    return f" and {accumulate} passes" if (accumulate or 1) > 1 else ""


def _machine(
    directories: tuple[Path, ...], ranks: int, local: int, progress: Progress | None, dtype: torch.dtype | None,
    start: Start | None,
) -> Hardware:  # fmt: skip
    """The machines of this run, as far as this one knows."""
    if start is not None:
        start.lap("planning")
    outwait_measuring(progress)
    machine, _ = machine_of(None, local, directories[0] if directories else None, progress, dtype)
    if start is not None:
        start.lap("measuring")
    nodes = max(1, ranks // max(1, local))
    between = machine.collective_bytes_per_s or machine.host_to_device_bytes_per_s
    more: dict[str, Any] = {"collective_bytes_per_s": between} if ranks > 1 else {}
    network = machine.network_bytes_per_s or NETWORK_BYTES_PER_S
    disk: dict[str, Any] = {} if directories else {"disk_bytes": 0}
    return dataclasses.replace(machine, nodes=nodes, network_bytes_per_s=network, **more, **disk)


def _plan_of(options: Options, per_rank: int) -> Plan:
    """The plan of a file. Checked before the machine is measured for it."""
    fields = read_plan(Path(options.plan))
    for name in ("device_bytes", "host_bytes", "disk"):
        if getattr(options, name) is not None:
            fields[name] = getattr(options, name)
    if options.states != "exact":
        fields["states"] = options.states
    passes = options.accumulate or fields.get("passes", 1)
    if isinstance(passes, bool) or not isinstance(passes, int) or passes < 1:
        raise TrainError(f"--plan {options.plan}: passes is a whole number above 0, got {passes!r}")
    if per_rank % passes:
        raise TrainError(f"{options.plan}: {passes} passes do not divide the {per_rank} sequences per rank evenly")
    try:
        plan = Plan(**(fields | {"passes": passes, "reduce_op": "sum"}))
    except (PlanError, TypeError) as error:
        raise PlanError(f"--plan {options.plan}: {error}") from None
    for folder in plan.directories:
        if not folder.is_dir():
            raise TrainError(f"--plan {options.plan}: disk {folder}: no such directory; make it, on a fast drive")
    return plan


def _given(options: Options, plan: Plan, outline: Outline, machine: Hardware, ranks: int, per_rank: int) -> Decision:
    """The plan of a file, judged on this machine."""
    passes = plan.passes
    prediction, why = None, ""
    for kept in _ways(plan):
        load = Workload(batch=per_rank // passes, seq=options.seq, passes=passes, activations=kept, clip=options.clip > 0)
        try:
            prediction = _predicted(outline, _for_states(plan, outline, load, machine), machine, ranks, load)
            break
        except (BudgetError, PlanError, ValueError) as error:
            why = f"; no prediction: {(str(error).splitlines() or [''])[0]}"
    host = plan.budget_host_bytes or machine.host_bytes // machine.devices_per_node
    of_all = plan.budget_device_bytes if plan.activations == "auto" else None
    rooms: dict[TierName, int] = {"device": of_all or machine.device_bytes, "host": host}
    chosen = ChosenPlan(
        **{item.name: getattr(plan, item.name) for item in dataclasses.fields(Plan)}, name=options.plan,
        model=outline.description.name, model_params=outline.description.params, machine=machine.name, ranks=ranks,
        workload=load, prediction=prediction, rooms=rooms,
    )  # fmt: skip
    line = answer(chosen) if prediction is not None else f"{count(chosen.model_params)} parameters, {options.plan}{why}"
    return Decision(plan, passes, line, chosen, machine)


def _ways(plan: Plan) -> tuple[Keeping, ...]:
    """What activations are counted as, the first that fits."""
    said = plan.activations
    return ("keep", "recompute") if said == "auto" else ("host",) if said == "disk" else (said,)


def _for_states(plan: Plan, outline: Outline, load: Workload, machine: Hardware) -> Plan:
    """With ``"auto"`` the device budget holds activations, too: the plan with what they leave of it."""
    if plan.activations != "auto":
        return plan
    there = plan.budget_device_bytes or int(DEVICE_SHARE * machine.device_bytes)
    taken = activation_bytes(outline, load)[0] + outline.ignored_bytes
    if taken >= there:
        what = f"activations are estimated at {format_bytes(taken)} of the device's {format_bytes(there)}"
        raise PlanError(f"{what}; it may fit all the same")
    return dataclasses.replace(plan, device_bytes=there - taken)


def _predicted(outline: Outline, plan: Plan, machine: Hardware, ranks: int, load: Workload) -> Any:
    room = plan.budget_device_bytes or int(0.9 * machine.device_bytes)
    host = plan.budget_host_bytes or int(0.85 * machine.host_bytes) // machine.devices_per_node
    return predict(make_job(outline, with_nodes(plan, machine, ranks), ranks, load, room, host), machine)


def read_plan(path: Path) -> dict[str, Any]:
    """Fields of ``Plan`` from a .toml file."""
    try:
        found = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise TrainError(f"--plan {path}: cannot be read as TOML: {error}") from None
    known = {item.name for item in dataclasses.fields(Plan)} - {"keep_fp32", "ignore", "output_dtype"}
    if unknown := sorted(set(found) - known):
        raise TrainError(f"--plan {path}: {unknown[0]} is no field of a plan; there are {', '.join(sorted(known))}")
    for name in ("compute_dtype", "reduce_dtype"):
        if isinstance(found.get(name), str) and found[name] not in ("int8", "int4"):
            dtype: torch.dtype | None = read_dtype(found[name].removeprefix("torch."))
            found[name] = dtype
    if isinstance(found.get("disk"), list):
        found["disk"] = tuple(found["disk"])
    if found.get("reduce_op", "sum") != "sum":
        raise TrainError(f"--plan {path}: leave reduce_op out; losses are averaged over the answer tokens of all ranks")
    return found
