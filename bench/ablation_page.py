"""The results of ``bench/ablation.py`` as docs/ablation.md, and the largest model of each row."""

import dataclasses
import json
import statistics
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from bench.ablation_cases import SIZES, Training
from bench.report import _machine
from bench.shapes import SHAPES, Shape
from bench.switches import SWITCHES
from bench.workload import Decoder
from unwall.planner.activations import activations_of
from unwall.planner.description import from_module
from unwall.planner.workload import Workload
from unwall.plans import Plan, PlanError
from unwall.shards.arrange import fitting
from unwall.shards.build import Room
from unwall.shards.tiles import forced
from unwall.tiers.sizes import parse_bytes

HEAD = """\
# What each technique is worth

Written by `python -m bench.ablation --report ... --docs docs/ablation.md`; do not edit. Only what was measured is
shown.

In each part a model trains with everything on, then with one technique off; ratios are against the first row of the
part, in the same run. The workload is the suite's ([benchmarks](benchmarks.md)): clipping is on and does not become
active, and times are medians over the timed steps. Which bandwidths 90% efficiency needs at 10B, 100B and 1T
parameters: [what hardware is needed](hardware.md).

- *overlap off*: every copy, disk request and collective is waited for where it is asked for; the update runs at the
  step, and the step waits for it.
- *prefetch off*: a group is fetched when it is used. *look-ahead 1*: one group ahead instead of two.
- *speculation off*: nothing is updated before its step, `AdamW(speculate=False)`. *journal*:
  where the host has no room for a second place of the states, a way back in a journal; *journal off*: without it.
- *split master off*: bf16 parameters with an fp32 master beside them instead of a 16-bit remainder.
- *sequence tiles off*, *activation offload off*: `sequence_tiles=None`, `activations="recompute"`. *tiling off*:
  `tiles=1`.
- *broadcast from an owner*: one rank moves all of a group from its host and broadcasts it.

The largest model is the deepest one of the same width that fits the same budgets, by the engine's own placement (for
long samples with the planner's activations, in the memory that the part names). Nobody trained it.
"""

NOTHING = """\
Nothing was measured yet. `python -m bench.ablation --size h200 --out bench/results/ablation/h200.json` measures a card
(`--size cores` a machine without one), and the command above makes this page of it."""


def fits(layers: int, training: Training) -> bool:
    """Whether a model of this depth is accepted."""
    shape: Shape = dataclasses.replace(SHAPES[training.shape], layers=layers)
    with torch.device("meta"):
        model = Decoder(shape)
    plan = Plan(**training.plan)
    device, host = plan.budget_device_bytes, plan.budget_host_bytes
    if training.within is not None:
        device, host = (parse_bytes(text) for text in training.within)
        tiles = plan.sequence_tiles or 1
        load = Workload(batch=1, seq=training.seq, activations=plan.activations, sequence_tiles=tiles)  # type: ignore[arg-type]
        taken = activations_of(from_module(model), load)
        device, host = device - taken.device_bytes, host - taken.host_bytes
        if device <= 0 or host <= 0:
            return False
        plan = dataclasses.replace(plan, device_bytes=device, host_bytes=host)
    return _accepted(model, plan, Room(device, host, plan.budget_disk_bytes))


def _accepted(model: nn.Module, plan: Plan, room: Room) -> bool:
    try:
        fitting(model, plan, 1, room, forced(model, plan))
    except PlanError:
        return False
    return True


def largest_params(training: Training, most_layers: int = 1 << 9) -> int | None:
    """Parameters of the largest model. None: nothing bounds it."""
    low, high = 0, 1
    while high <= most_layers and fits(high, training):
        low, high = high, 2 * high
    if high > most_layers:
        return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle, training) else (low, middle)
    return dataclasses.replace(SHAPES[training.shape], layers=low).params if low else 0


def largest_hidden(tiles: int | None, device_bytes: int, step: int = 256) -> int:
    """Of one layer H -> 4H with states on the host."""
    plan = Plan(params="host", optimizer="host", device_bytes=device_bytes, tiles=tiles)

    def accepted(units: int) -> bool:
        layer = nn.Linear(units * step, 4 * units * step, bias=False, device="meta")
        return _accepted(nn.Sequential(layer), plan, Room(device_bytes, None, None))

    low, high = 0, 1
    while high < 1 << 12 and accepted(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if accepted(middle) else (low, middle)
    return low * step


def add_largest(result: dict[str, Any]) -> None:
    """Computes what the rows do not say yet."""
    parts = SIZES[result["size"]]()
    for name, found in result["parts"].items():
        known: dict[int, int | None] = {}
        for row in found["rows"]:
            if "error" in row or "largest" in row or parts[name].ranks:
                continue
            if parts[name].layer:
                hidden = parts[name].layer["hidden"]
                tiles = 1 if row["row"] == "tiling off" else None
                row["largest"] = f"H {largest_hidden(tiles, hidden * hidden):,}"
                continue
            training = parts[name].trainings[row["process"]]
            if row["process"] not in known:
                known[row["process"]] = _with_switch(training)
            params = known[row["process"]]
            row["largest"] = "" if params is None else f"{params / 1e9:.3g}B" if params else "none"


def _with_switch(training: Training) -> int | None:
    if not training.built:
        return largest_params(training)
    with SWITCHES[training.built]():
        return largest_params(training)


def table(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """A part's rows, for each batch against the first."""
    if any("world" in row for row in rows):
        return _ranks_table(rows)
    several = len({row.get("batch") for row in rows if "error" not in row}) > 1
    head = ["technique", *(["samples"] if several else []), "s per step", "against the first", "device", "host", "disk"]
    lines = [f"| {' | '.join([*head, 'largest model'])} |", "|" + "---|" * (len(head) + 1)]
    first: dict[Any, float] = {}
    for row in rows:
        if "error" in row:
            lines.append(f"| {row['row']} | {row['error'].replace('|', ' ')} |" + " |" * (len(head) - 1))
            continue
        seconds, batch = statistics.median(row["times_s"]), row.get("batch")
        first.setdefault(batch, seconds)
        cells = [row["row"], *([str(batch)] if several else []), f"{seconds:.3g}", f"{seconds / first[batch]:.2f}"]
        cells += [_size(row["peak_bytes"].get(tier)) for tier in ("device", "host", "disk")]
        lines.append(f"| {' | '.join([*cells, row.get('largest', '')])} |")
    return lines


def _ranks_table(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    head = ("ranks", "parameters come", "s per pass", "against the first", "over one link, per pass", "of the largest group",
            "from other ranks, per pass")  # fmt: skip
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    first: dict[int, float] = {}
    for row in rows:
        base = first.setdefault(row["world"], row["step_s"])
        sizes = [_size(row[key]) for key in ("link_bytes", "group_bytes", "received_bytes")]
        cells = [str(row["world"]), row["row"], f"{row['step_s']:.3g}", f"{row['step_s'] / base:.2f}", *sizes]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _size(nbytes: int | None) -> str:
    if not nbytes:
        return ""
    return f"{nbytes / 2**30:.2f} GiB" if nbytes >= 1 << 30 else f"{nbytes / 2**20:.1f} MiB"


def section(result: Mapping[str, Any]) -> str:
    """One machine."""
    where = result["machine"]
    said = f"Machine: {_machine(where)}. Date: {where['date']}. torch {result['torch']}."
    if where.get("commit"):
        said += f" Commit: {where['commit']}."
    if where.get("load") is not None:
        said += f" Processes that wanted a core before the run (load average): {where['load']:.1f}."
    devices = where["devices"]
    name = devices[0].split(",")[0] if devices else f"{where['cores']} cores"
    lines = [f"## {name}, {where['date']}", "", *_wrapped(said)]
    lines += ["", "```", result["command"], "```", ""]
    for part in result["parts"].values():
        lines += [f"### {part['title']}", "", *table(part["rows"]), ""]
    if not devices:
        lines += _wrapped(
            "Device and host are the same memory here. Where a title names a speed of links, copies between the two are held "
            "to it by the worker pools' own throttle, as in the tests of overlap."
        )
        lines.append("")
    return "\n".join(lines)


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, 118, break_long_words=False, break_on_hyphens=False)


def write(page: Path, files: Sequence[Path]) -> None:
    """The page, from the files; what they did not say about the largest model is written into them."""
    results = []
    for path in files:
        result = json.loads(path.read_text())
        add_largest(result)
        path.write_text(json.dumps(result, indent=1) + "\n")
        results.append(result)
    page.parent.mkdir(parents=True, exist_ok=True)
    found = "\n".join(section(result) for result in results).rstrip() or NOTHING
    page.write_text(f"{HEAD}\n{found}\n")
