"""Predictions beside what the engine did, for twelve plans of the 50m decoder on this machine.

    python -m bench.prediction                     # prints the table
    python -m bench.prediction --docs docs/planner.md --json results/prediction.json

The machine is measured (``unwall.probe``) before each round over the plans. Peak bytes are the engine's own account after two
warm steps. Others may be using the machine: a step's time is the least of those timed, over all rounds, and of the probes the
one that was disturbed least (with the least predicted step) counts.
"""

import argparse
import dataclasses
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

import unwall
from bench.engines.unwall import plan_fields
from bench.shapes import SHAPES
from bench.spec import parse_spec
from bench.workload import ADAMW, VARIANTS, batch_of, build
from unwall.planner import hardware
from unwall.planner.hardware import Hardware
from unwall.planner.job import Workload, make_job
from unwall.planner.outline import Outline, outline_of
from unwall.planner.predict import Prediction, predict
from unwall.planner.probe import probe
from unwall.plans import Plan

SHAPE, CLIP, WARM = "50m", 1.0, 2
MARKS = ("<!-- written by bench/prediction.py -->", "<!-- end -->")
H200_MARKS = ("<!-- written by bench/prediction.py: h200 -->", "<!-- end: h200 -->")
HOST, DISK = {"params": "host", "optimizer": "host"}, {"params": "disk", "grads": "disk", "optimizer": "disk"}
CASES: tuple[tuple[str, dict[str, Any], int, int, int], ...] = (
    ("device", {}, 2, 128, 1),
    ("device", {}, 8, 128, 1),
    ("device, fp32", {"compute_dtype": torch.float32}, 2, 128, 1),
    ("device", {}, 2, 128, 3),
    ("host", HOST, 2, 128, 1),
    ("host", HOST, 8, 128, 1),
    ("host", HOST | {"device_bytes": "100MiB"}, 2, 128, 1),
    ("host", HOST, 2, 128, 3),
    ("auto", {"device_bytes": "400MiB"}, 4, 128, 1),
    ("parameters device, optimizer host", {"params": "device", "optimizer": "host"}, 4, 128, 1),
    ("optimizer disk", {"params": "host", "optimizer": "disk"}, 4, 128, 1),
    ("disk", DISK, 4, 128, 1),
)
"""Name, fields of the plan, samples per pass, tokens per sample, passes per step."""
H200 = Path("bench/machines/h200.json")
"""What ``unwall.probe`` measured on the machine of the results below (``tools/gpu_check probe``)."""
H200_RESULTS = "bench/results/h200-*.json"
ACTIVE_CLIP = 1.0
"""Limits of the norm up to this one are taken to clip; larger ones were chosen so as not to."""


@dataclasses.dataclass(frozen=True)
class Row:
    """One plan: predicted and measured."""

    plan: str
    batch: str
    predicted_bytes: dict[str, int]
    measured_bytes: dict[str, int]
    predicted_s: float
    measured_s: float

    @property
    def bytes_off(self) -> float:
        """The largest deviation of a tier that holds anything."""
        tiers = [tier for tier, nbytes in self.measured_bytes.items() if nbytes]
        return max(abs(self.predicted_bytes[tier] / self.measured_bytes[tier] - 1) for tier in tiers)

    @property
    def step_off(self) -> float:
        return self.predicted_s / self.measured_s - 1


def outline(shape: str = SHAPE) -> Outline:
    """The decoder as the planner sees it. Its head is recomputed, too: it counts to the last block."""
    found = outline_of(build(SHAPES[shape], "meta"), shape)
    head = dataclasses.replace(found.operators[-1], block=found.description.blocks - 1)
    return dataclasses.replace(found, operators=(*found.operators[:-1], head))


def predicted(fields: dict[str, Any], load: Workload, machine: Hardware, shape: str = SHAPE) -> Prediction:
    plan = Plan(**fields)
    return predict(make_job(outline(shape), plan, 1, load, plan.budget_device_bytes, plan.budget_host_bytes), machine)


def measured(fields: dict[str, Any], load: Workload, seconds: float) -> tuple[dict[str, int], float]:
    """The engine's peaks and the fastest step of those that ``seconds`` allow, of two at least."""
    shape = SHAPES[SHAPE]
    model = build(shape, "cpu")
    unwall.shard(model, Plan(**fields))
    optimizer = unwall.AdamW(model.parameters(), **ADAMW, max_grad_norm=CLIP)
    device = next(model.parameters()).device
    batches = [batch_of(shape, load.batch, load.seq, device, seed) for seed in range(load.passes)]
    times: list[float] = []
    start = time.perf_counter()
    while len(times) < WARM + 2 or time.perf_counter() - start < seconds:
        if len(times) == WARM:
            unwall.stats(model).reset()
        begin = time.perf_counter()
        for tokens, labels in batches:
            model(tokens, labels).backward()
        optimizer.step()
        optimizer.zero_grad()
        times.append(time.perf_counter() - begin)
    return {tier: found.peak_bytes for tier, found in unwall.stats(model).tiers.items()}, min(times[WARM:])


def run(folder: Path, rounds: int, seconds: float) -> tuple[Hardware, list[Row]]:
    machines: list[Hardware] = []
    found: dict[int, tuple[dict[str, int], float]] = {}
    for _ in range(rounds):
        machines.append(probe(disk=folder, refresh=True))
        for number, (name, fields, batch, seq, passes) in enumerate(CASES):
            given = fields | ({"disk": folder} if "disk" in fields.values() else {})
            peaks, step_s = measured(given, Workload(batch=batch, seq=seq, passes=passes), seconds)
            found[number] = (peaks, min(step_s, found[number][1] if number in found else step_s))
            print(f"{name}, {passes} x {batch} x {seq}: {found[number][1]:.3f} s", flush=True)
    machines.append(probe(disk=folder, refresh=True))
    machine = min(machines, key=lambda probed: predicted({}, Workload(batch=4, seq=128), probed).step_s)
    rows = []
    for number, (name, fields, batch, seq, passes) in enumerate(CASES):
        given = fields | ({"disk": folder} if "disk" in fields.values() else {})
        expected = predicted(given, Workload(batch=batch, seq=seq, passes=passes), machine)
        budget = f", {fields['device_bytes']} of device" if "device_bytes" in fields else ""
        peaks = {tier: int(nbytes) for tier, nbytes in expected.peak_bytes.items()}
        rows.append(
            Row(name + budget, f"{passes} x {batch} x {seq}", peaks, found[number][0], expected.step_s, found[number][1])
        )
    return machine, rows


def table(machine: Hardware, rows: list[Row], rounds: int, seconds: float) -> str:
    lines = [
        "| plan | passes x samples x tokens | device MiB | host MiB | disk MiB | off by | step s | off by |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        cells = []
        for tier in ("device", "host", "disk"):
            there = row.measured_bytes.get(tier, 0)
            cells.append(f"{row.predicted_bytes[tier] / 2**20:.1f} / {there / 2**20:.1f}" if there else "")
        step = f"{row.predicted_s:.3f} / {row.measured_s:.3f}"
        off = f"{100 * row.bytes_off:.1f}% | {step} | {100 * row.step_off:+.0f}%"
        lines.append(f"| {row.plan} | {row.batch} | {' | '.join(cells)} | {off} |")
    close = sum(row.bytes_off <= 0.05 for row in rows)
    timed = sum(abs(row.step_off) <= 0.3 for row in rows)
    matmul = machine.matmul_flops_per_s.get("bfloat16", 0) / 1e9
    lines += [
        "",
        f"Predicted / measured. Peak bytes within 5% for {close} of {len(rows)} plans, step time within 30% for {timed}. "
        f"{machine.host_cores} cores, {matmul:.0f} GFLOP/s in bf16, {machine.host_memory_bytes_per_s / 1e9:.0f} GB/s under "
        f"AdamW, as `unwall probe` measured at the same time; the fastest step of {rounds} rounds of {seconds:g} s per plan.",
    ]
    return "\n".join(lines)


def h200_table() -> str:
    """Nothing is run: predictions for every row of unwall in the suite's results, with the machine as it was probed."""
    machine = hardware.load(H200)
    lines = ["| engine | shape | commit | predicted s | measured s | off by |", "|---|---|---|---|---|---|"]
    for path in sorted(Path().glob(H200_RESULTS)):
        result = json.loads(path.read_text())
        for row in result["rows"]:
            if row["status"] != "ok" or not row["engine"].startswith("unwall"):
                continue
            options = parse_spec(row["engine"]).options
            if options.keys() & set(VARIANTS):
                continue  # another model than the planner is told of
            fields, optimizer = plan_fields(options, Path("disk"))
            clipped = row["clip"] is not None and row["clip"] <= ACTIVE_CLIP
            load = Workload(batch=row["batch"], seq=row["seq"], clip=clipped, **optimizer)
            found, step_s = predicted(fields, load, machine, row["shape"]).step_s, row["step_s"]
            numbers = f"{found:.3f} | {step_s:.3f} | {100 * (found / step_s - 1):+.0f}%"
            lines.append(f"| `{row['engine']}` | {row['shape']} | {result['machine']['commit']} | {numbers} |")
    return "\n".join(lines)


def put(page: Path, begin: str, end: str, shown: str) -> None:
    """Replaces what lies between two marks."""
    before, mark, rest = page.read_text().partition(begin)
    _, other, after = rest.partition(end)
    if not mark or not other:
        raise SystemExit(f"{page} has no place marked {begin} to {end}")
    page.write_text(f"{before}{begin}\n\n{shown}\n\n{end}{after}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=6.0, help="for the steps of one plan, in each round")
    parser.add_argument("--docs", type=Path, help="a page with a marked place for the table")
    parser.add_argument("--json", type=Path)
    parser.add_argument(
        "--h200", action="store_true", help="only the table of the H200: predictions, and the suite's results from there"
    )
    options = parser.parse_args()
    if options.docs:
        put(options.docs, *H200_MARKS, h200_table())
    if options.h200:
        print(h200_table())
        return
    with tempfile.TemporaryDirectory(prefix="unwall-prediction-") as folder:
        machine, rows = run(Path(folder), options.rounds, options.seconds)
    shown = table(machine, rows, options.rounds, options.seconds)
    print(shown)
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        content = {"machine": machine.to_dict(), "rows": [dataclasses.asdict(row) for row in rows]}
        options.json.write_text(json.dumps(content, indent=1))
    if options.docs:
        put(options.docs, *MARKS, shown)


if __name__ == "__main__":
    main()
