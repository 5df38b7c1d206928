"""What each technique is worth: ``python -m bench.ablation --size cores|h200 --out bench/results/ablation/NAME.json``.

Each part trains a model with everything on and with one technique off at a time; the rows of a part are held against its first
one, in the same run. Rows that only change how the engine works take turns in one process on one model, others have a process
of their own. ``--parts`` runs some of them; what the file holds of others stays.

    python -m bench.ablation --size h200 --out bench/results/ablation/h200.json        # about 5 minutes
    python -m bench.ablation --size cores --out bench/results/ablation/two-cores.json  # about 6 minutes
    python -m bench.ablation --report bench/results/ablation/*.json --docs docs/ablation.md

``--page`` makes the page at once, of all results beside ``--out``:

    python -m bench.ablation --size cores --out bench/results/ablation/two-cores.json --page

``--report`` also computes the largest model of each row, which takes no accelerator, and writes it into the files.
"""

import argparse
import dataclasses
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

import unwall
from bench import ablation_page, machine, owner, tiling
from bench.ablation_cases import SIZES, Training
from bench.activations import KeepingDecoder
from bench.engines.unwall import _fill
from bench.shapes import SHAPES
from bench.switches import SWITCHES
from bench.workload import ADAMW, batch_of, build

CLIP = 1000.0
"""Clipping is on, as it usually is, and does not become active."""
LIMIT_S = 300.0
"""For one process."""
FORMAT = 1


def measure(training: Training, steps: int, rounds: int, scratch: Path) -> list[dict[str, Any]]:
    """The rows of one process."""
    shape, device = SHAPES[training.shape], torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with ExitStack() as stack:
        if training.built:
            stack.enter_context(SWITCHES[training.built]())
        plan = dict(training.plan) | ({"disk": scratch} if training.plan.get("disk") == "scratch" else {})
        if training.keeps:
            with torch.device("meta"):
                model: torch.nn.Module = KeepingDecoder(shape)
        else:
            model = build(shape, "meta")
        unwall.shard(model, unwall.Plan(**plan))
        _fill(model)
        optimizer = unwall.AdamW(model.parameters(), max_grad_norm=CLIP, speculate=training.speculate, **ADAMW)
        run = Run(model, optimizer, device)
        run.hold_links(training.link_bytes_per_s)
        found: dict[tuple[str, int], dict[str, Any]] = {}
        for batch in training.batches:
            data = batch_of(shape, batch, training.seq, device, 0)
            run.steps(data, training.warm)
            for _ in range(rounds):
                for row in training.rows:
                    note = found.setdefault((row, batch), {"row": row, "batch": batch, "times_s": [], "losses": []})
                    run.measure(note, data, row, steps)
        return list(found.values())


class Run:
    """A model in training."""

    def __init__(self, model: torch.nn.Module, optimizer: unwall.AdamW, device: torch.device) -> None:
        self.model, self.optimizer, self.device = model, optimizer, device
        self.engine = unwall.api.engine(model)

    def hold_links(self, bytes_per_s: float | None) -> None:
        """A machine without an accelerator has no link: copies are held to what one may have."""
        if bytes_per_s is not None and self.device.type == "cpu":
            for ends in (("host", "device"), ("device", "host")):
                self.engine.tiers.links.pool(*ends).throttle(2 * bytes_per_s)  # each byte is read and written

    def steps(self, data: tuple[torch.Tensor, torch.Tensor], count: int, waits: bool = False) -> tuple[list[float], float]:
        """Seconds of each step, to its end on the device, and the last loss. ``waits``: also to the end of its update."""
        times, last = [], float("nan")
        for _ in range(count):
            self._wait()
            start = time.perf_counter()
            loss = self.model(*data)
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            if waits:
                self.engine.finish()
            self._wait()
            times.append(time.perf_counter() - start)
            last = float(loss.detach())
        return times, last

    def measure(self, note: dict[str, Any], data: tuple[torch.Tensor, torch.Tensor], row: str, steps: int) -> None:
        """Adds the steps of a row to its note, and what they held at most."""
        with ExitStack() as stack:
            if row in SWITCHES and row != "split master off":  # that one is on from the beginning
                stack.enter_context(SWITCHES[row]())
            if row == "speculation off":
                self.engine.finish()
                self.optimizer._early.shadows.reclaim(wait=True)  # they are not its memory
            waits = row == "overlap off"
            unwall.stats(self.model).reset()  # waits for updates, so an untimed step comes after it
            if self.device.type == "cuda":
                torch.cuda.reset_peak_memory_stats()
            self.steps(data, 1, waits)
            times, loss = self.steps(data, steps, waits)
        note["times_s"] += times
        note["losses"].append(loss)
        stats = unwall.stats(self.model)
        peak = {tier: held.peak_bytes for tier, held in stats.tiers.items()}
        if self.device.type == "cuda":
            peak["device"] = torch.cuda.max_memory_allocated()
        note["peak_bytes"] = {tier: max(nbytes, note.get("peak_bytes", {}).get(tier, 0)) for tier, nbytes in peak.items()}
        note["process_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
        note["ahead"] = dataclasses.asdict(stats.speculated)

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def layer_rows(hidden: int, tokens: int, steps: int) -> list[dict[str, Any]]:
    """One layer of eight times the budget in tiles, and whole."""
    weight_bytes = 4 * hidden * hidden * 2
    rows = {"all on": {"device_bytes": weight_bytes // 8}, "tiling off": {"tiles": 1}}
    found = []
    for row, options in rows.items():
        plan = unwall.Plan(params="host", optimizer="host", **options)
        done = tiling.train(hidden, tokens, plan, steps)
        peak = {"device": done["ledger_bytes"]}
        if done["peak_bytes"]:
            peak["device"] = done["peak_bytes"]
        found.append({"row": row, "times_s": [done["seconds"]], "peak_bytes": peak, "tiles": done["tiles"]})
    return found


def run_part(size: str, name: str, options: argparse.Namespace) -> dict[str, Any]:
    """One part, in processes of its own."""
    part = SIZES[size]()[name]
    if part.ranks:
        return {"title": part.title, "rows": owner.run(**part.ranks)}
    rows = []
    for index in range(max(1, len(part.trainings))):
        command = [sys.executable, "-m", "bench.ablation", "--size", size, "--one", name, str(index)]
        command += ["--steps", str(options.steps), "--rounds", str(options.rounds), "--scratch", str(options.scratch)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=LIMIT_S)
            failure = (done.stderr.strip().splitlines() or ["?"])[-1][:300] if done.returncode else ""
        except subprocess.TimeoutExpired:
            failure = f"not done in {LIMIT_S:.0f} s"
        if failure:
            named = part.trainings[index].rows if part.trainings else ("all on", "tiling off")
            rows += [{"row": row, "error": failure} for row in named]
        else:
            rows += [row | {"process": index} for row in json.loads(done.stdout.splitlines()[-1])]
        for row in rows[-len(part.trainings[index].rows) :] if part.trainings else rows:
            said = row.get("error") or f"{statistics.median(row['times_s']):.4g} s"
            print(f"{name}: {row['row']}: {said}", file=sys.stderr, flush=True)
    return {"title": part.title, "rows": rows}


def run_one(options: argparse.Namespace) -> None:
    """In the process of its own."""
    name, index = options.one[0], int(options.one[1])
    part = SIZES[options.size]()[name]
    with tempfile.TemporaryDirectory(prefix="bench-ablation-", dir=options.scratch) as folder:
        if part.layer:
            rows = layer_rows(**part.layer)
        else:
            rows = measure(part.trainings[index], options.steps, options.rounds, Path(folder))
        print(json.dumps(rows), flush=True)


def run_all(options: argparse.Namespace) -> None:
    parts = options.parts or list(SIZES[options.size]())
    described = machine.describe(options.commit)
    begun = time.perf_counter()
    result = json.loads(options.out.read_text()) if options.out.exists() else {"format": FORMAT, "parts": {}}
    result |= {"size": options.size, "machine": described, "torch": torch.__version__}
    command = f"python -m bench.ablation --size {options.size} --steps {options.steps} --rounds {options.rounds}"
    result["command"] = command + (f" --parts {' '.join(options.parts)}" if options.parts else "")
    options.out.parent.mkdir(parents=True, exist_ok=True)
    for name in parts:
        result["parts"][name] = run_part(options.size, name, options)
        options.out.write_text(json.dumps(result, indent=1) + "\n")  # what was measured is kept, whatever comes after
    print(f"{options.out}: {time.perf_counter() - begun:.0f} s")


def _arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=sorted(SIZES), default="tiny")
    parser.add_argument("--parts", nargs="*", help="host, journal, disk, long, layer, ranks; all of them unless given")
    parser.add_argument("--steps", type=int, default=4, help="timed steps per row and round")
    parser.add_argument("--rounds", type=int, default=1, help="over the rows of a process, in turn")
    parser.add_argument("--out", type=Path, default=Path("results/ablation.json"))
    parser.add_argument("--scratch", type=Path, default=Path(), help="where the folder for disk tiers is made, then removed")
    parser.add_argument("--commit", help="what was measured, where git cannot tell")
    parser.add_argument("--report", type=Path, nargs="*", help="runs nothing: makes the page of these results")
    parser.add_argument("--page", action="store_true", help="then makes the page of all results beside --out")
    parser.add_argument("--docs", type=Path, default=Path("docs/ablation.md"))
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    options = _arguments(arguments)
    if options.report is not None:
        ablation_page.write(options.docs, options.report)
    elif options.one:
        run_one(options)
    else:
        run_all(options)
        if options.page:
            ablation_page.write(options.docs, sorted(options.out.parent.glob("*.json")))


if __name__ == "__main__":
    main()
