"""A chosen plan as tables, as JSON and as text."""

import io
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from unwall.planner.answer import answer, code, kept_words, plan_fields
from unwall.planner.choose import ChosenPlan
from unwall.planner.dryrun import DryRun
from unwall.planner.hardware import Hardware
from unwall.planner.mesh_cost import MeshCost, mesh_lines
from unwall.planner.predict import Prediction
from unwall.planner.search import Verdict
from unwall.planner.words import seconds
from unwall.planner.workload import Workload
from unwall.tiers.sizes import format_bytes

MAX_RUNNERS_UP = 8
MAX_MESHES = 10
KEPT_WORDS = {"keep": "kept", "auto": "decided by block", "recompute": "recomputed", "host": "recomputed from the host"}


def as_text(plan: ChosenPlan, width: int = 120) -> str:
    """The tables without colours."""
    out = io.StringIO()
    Console(file=out, width=width, color_system=None, highlight=False).print(tables(plan))
    return out.getvalue().rstrip()


def short(plan: ChosenPlan) -> Text:
    """The answer, the line to paste, and what is left to do."""
    return Text("\n".join([answer(plan), code(plan), *(f"- {line}" for line in (*plan.advice, *mesh_lines(plan.meshes)))]))


def tables(plan: ChosenPlan) -> RenderableType:
    """Everything there is to see of a plan, the answer first."""
    parts: list[RenderableType] = [Text(answer(plan), style="bold"), Text(f"{plan.model}: {plan.name}"), Text(code(plan))]
    if plan.prediction is not None:
        parts += [_bytes(plan.prediction), _time(plan.prediction), Text(summary(plan))]
    parts += [Text(f"- {line}") for line in (*plan.advice, *mesh_lines(plan.meshes))]
    if plan.kept_otherwise:
        parts.append(_kept(plan))
    if len(plan.meshes) > 1:
        parts.append(_meshes(plan.meshes))
    if plan.runners_up:
        parts.append(_lost(plan.runners_up))
    return Group(*parts)


def workload_words(load: Workload) -> str:
    passes = f"{load.passes} passes of " if load.passes > 1 else ""
    kept = KEPT_WORDS[load.activations]
    return f"{passes}{load.batch} x {load.seq} tokens per rank, activations {kept}"


def summary(plan: ChosenPlan) -> str:
    """The step in one line each."""
    found = plan.prediction
    assert found is not None
    lines = [
        f"predicted step {seconds(found.step_s)} ({workload_words(plan.workload)}): {found.tokens_per_s:,.0f} tokens/s, "
        f"{100 * found.mfu:.0f}% of the matmul rate",
        f"lower bound {seconds(found.bound.step_s)}, set by {found.bound.limit}",
    ]
    if found.disk_written_bytes_per_day:
        worn = "" if found.disk_days is None else f": worn out after {found.disk_days:,.0f} days"
        lines.append(f"a node's drives take {found.disk_written_bytes_per_day / 1e12:.1f} TB per day{worn}")
    return "\n".join(lines)


def _bytes(found: Prediction) -> Table:
    table = Table("tier, per rank", "term", title="bytes", title_justify="left")
    table.add_column("bytes", justify="right")
    for tier, terms in found.terms.items():
        for name, nbytes in terms.items():
            table.add_row(tier, name, format_bytes(nbytes))
        if terms:
            total = f"{format_bytes(sum(terms.values()))} at most"
            table.add_row(tier, f"account at its peak: {format_bytes(found.peak_bytes[tier])}", total, style="bold")
    return table


def _time(found: Prediction) -> Table:
    table = Table("resource", title="a step, by resource", title_justify="left")
    table.add_column("at the least", justify="right")
    table.add_column("simulated, at work", justify="right")
    simulated = {"host memory": "update"}
    for name, value in found.bound.seconds.items():
        busy = found.busy_s.get(simulated.get(name, name))
        if value or busy:
            table.add_row(name, seconds(value), "" if busy is None else seconds(busy))
    return table


def _kept(plan: ChosenPlan) -> Table:
    table = Table("activations", title="activations, with this placement", title_justify="left")
    for name in ("device", "host", "step"):
        table.add_column(name, justify="right")
    table.add_column("why")
    for row in plan.kept_otherwise:
        step = "" if row.step_s is None else seconds(row.step_s)
        chosen = row.activations == plan.workload.activations
        why = kept_words(plan) if chosen else row.reason
        shown = KEPT_WORDS[row.activations]
        table.add_row(
            shown, format_bytes(row.device_bytes), format_bytes(row.host_bytes) if row.host_bytes else "", step, why,
            style="bold" if chosen else None,
        )  # fmt: skip
    return table


def _meshes(costs: tuple[MeshCost, ...]) -> Table:
    table = Table("mesh", title="meshes, by bytes per link (see [Note: cost of a mesh])", title_justify="left")
    for name in ("step", "compute", "tp", "gathers, reductions", "bubble", "device"):
        table.add_column(name, justify="right")
    table.add_column("how")
    for cost in costs[:MAX_MESHES]:
        times = (cost.step_s, cost.compute_s, cost.tensor_s, cost.data_s, cost.bubble_s)
        kept = "recomputed" if cost.recompute else "kept"
        how = cost.lack or f"{cost.passes} passes, activations {kept}{', states on the host' if cost.on_host else ''}"
        shown = [seconds(value) if value and not cost.lack else "" for value in times]
        table.add_row(str(cost.mesh), *shown, format_bytes(int(cost.device_bytes)), how)
    if len(costs) > MAX_MESHES:
        table.add_row(f"and {len(costs) - MAX_MESHES} more")
    return table


def _lost(verdicts: tuple[Verdict, ...]) -> Table:
    table = Table("others", "workload", title="those that lost", title_justify="left")
    table.add_column("step", justify="right")
    table.add_column("why")
    for verdict in verdicts[:MAX_RUNNERS_UP]:
        step = "" if verdict.step_s is None else seconds(verdict.step_s)
        table.add_row(verdict.name, workload_words(verdict.workload), step, verdict.reason)
    if len(verdicts) > MAX_RUNNERS_UP:
        table.add_row(f"and {len(verdicts) - MAX_RUNNERS_UP} more", "", "", "")
    return table


def hardware_table(found: Hardware) -> Table:
    """What a machine reaches."""
    table = Table("what", title=found.name, title_justify="left")
    table.add_column("measured", justify="right")
    rows: list[tuple[str, float | None, str]] = [
        ("device memory", found.device_bytes, "bytes"),
        ("host memory", found.host_bytes, "bytes"),
        ("disk, free", found.disk_bytes, "bytes"),
        ("host to device", found.host_to_device_bytes_per_s, "rate"),
        ("device to host", found.device_to_host_bytes_per_s, "rate"),
        ("both at once", found.host_link_bytes_per_s, "rate"),
        ("host memory under AdamW", found.host_memory_bytes_per_s, "rate"),
        ("device memory", found.device_memory_bytes_per_s, "rate"),
        ("disk reads", found.disk_read_bytes_per_s, "rate"),
        ("disk writes", found.disk_write_bytes_per_s, "rate"),
        ("disk, both at once", found.disk_both_bytes_per_s, "rate"),
        ("collectives", found.collective_bytes_per_s, "rate"),
    ]
    for name, value, kind in rows:
        if value:
            table.add_row(name, format_bytes(int(value)) if kind == "bytes" else f"{value / 1e9:.1f} GB/s")
    for dtype, rate in found.matmul_flops_per_s.items():
        table.add_row(f"matmul, {dtype}", _flops(rate))
    for dtype, rate in found.block_flops_per_s.items():
        table.add_row(f"transformer block, {dtype}", _flops(rate))
    return table


def _flops(rate: float) -> str:
    return f"{rate / 1e12:.1f} TFLOP/s" if rate >= 1e12 else f"{rate / 1e9:.0f} GFLOP/s"


def dry_run_table(found: DryRun) -> Table:
    """What the dry run agreed on."""
    ranks = f"{found.ranks} rank{'s' * (found.ranks != 1)}"
    title = f"dry run: {found.params:,} parameters in {found.groups} groups on {ranks}, {found.seconds:.1f} s"
    table = Table("a rank holds (parameters, master, moments)", title=title, title_justify="left")
    table.add_column("bytes", justify="right")
    for tier, nbytes in found.bytes_held.items():
        if nbytes:
            table.add_row(f"{tier}, by its account", format_bytes(nbytes))
    table.add_row("by the formula, without padding", format_bytes(int(found.formula_bytes)))
    table.add_row("numbers of the ranks that were sharded", ", ".join(map(str, found.tried)))
    return table


def to_dict(plan: ChosenPlan) -> dict[str, Any]:
    """For JSON."""
    return {
        "model": plan.model,
        "machine": plan.machine,
        "ranks": plan.ranks,
        "name": plan.name,
        "plan": plan_fields(plan),
        "workload": dict(vars(plan.workload)),
        "activations": [dict(vars(row)) for row in plan.kept_otherwise],
        "weight_tiles": plan.weight_tiles,
        "meshes": [{"mesh": cost.mesh.dimensions(), "step_s": cost.step_s, "lack": cost.lack} for cost in plan.meshes],
        "advice": list(plan.advice),
        "prediction": None if plan.prediction is None else plan.prediction.to_dict(),
        "runners_up": [
            {"name": v.name, "workload": dict(vars(v.workload)), "step_s": v.step_s, "reason": v.reason}
            for v in plan.runners_up
        ],
    }
