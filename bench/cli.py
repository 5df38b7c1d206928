"""The suite's command line.

    python -m bench --engines plain fsdp2 unwall unwall-host:device_bytes=9GiB,clip=none --shapes 3b --batch 8 --seq 2048
    python -m bench --report bench/results/*.json --docs docs/benchmarks.md

An engine's name may carry options: ``clip=none`` or ``clip=X`` for any; fields of ``unwall.Plan`` and ``update_in_backward``
for unwall's; ``sub_group_size``, ``pipeline`` and ``buffer_count`` for DeepSpeed's. One that is not installed, crashes, is
killed, runs out of memory or of time is a row that says so. Exit code: 0 when the losses of all finished engines agree, 1 when
not, 2 for a wrong command, 3 when no engine finished, 130 when stopped (what was measured until then is saved).
"""

import argparse
import itertools
import re
import shlex
import signal
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench import machine, report, results
from bench.engines import ENGINES
from bench.launch import Case, run_engine
from bench.losses import disagreements
from bench.shapes import SHAPES
from bench.spec import Spec, SpecError, parse_spec


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    signal.signal(signal.SIGTERM, _stop)  # ended from outside, as by timeout(1): what was measured is saved, no rank is left
    try:
        return _report(options) if options.report else _run(options)
    except (SpecError, results.ResultError) as error:
        print(f"bench: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", nargs="+", default=["plain", "fsdp2", "unwall"], help=f"of {', '.join(ENGINES)}")
    parser.add_argument("--shapes", nargs="+", default=["tiny"], choices=SHAPES)
    parser.add_argument("--batch", type=_count, default=2, help="sequences per rank and step")
    parser.add_argument("--seq", type=_count, default=128, help="tokens per sequence")
    parser.add_argument("--steps", type=_count, default=6, help="timed steps per round")
    parser.add_argument("--warm", type=_count, default=2, help="steps before them")
    parser.add_argument(
        "--repeats", type=_count, default=1, help="rounds over the engines, in turn, for a machine that others use"
    )
    parser.add_argument("--world", type=_count, default=1, help="ranks on this machine")
    parser.add_argument("--timeout", type=float, default=600.0, help="the most seconds that an engine may take per round")
    parser.add_argument("--title", help="of the run, and the name of its files")
    parser.add_argument("--commit", help="what was measured, where git cannot tell")
    parser.add_argument("--out", type=Path, default=Path("results/bench"), help="folder for JSON, Markdown and the picture")
    parser.add_argument("--docs", type=Path, help="a page made of all results in --out, or of those named by --report")
    parser.add_argument("--report", type=Path, nargs="+", help="runs nothing: shows these results")
    parser.add_argument("--scratch", type=Path, default=Path(), help="where the folder for disk tiers is made, then removed")
    parser.add_argument("--profile", type=Path, help="a folder for the time line of each engine that can give one (one rank)")
    parser.add_argument("--logs", type=Path, help="keeps what the engines print")
    return parser


def _run(options: argparse.Namespace) -> int:
    specs = [parse_spec(text) for text in options.engines]
    if options.profile:
        options.profile.mkdir(parents=True, exist_ok=True)
    described = machine.describe(options.commit)  # before the engines, so that its load is other people's
    with tempfile.TemporaryDirectory(prefix="bench-scratch-", dir=options.scratch) as folder:
        scratch = Path(folder)
        speeds = machine.probe(scratch if any(spec.engine.tier == "disk" for spec in specs) else None)
        rounds: dict[tuple[str, str], list[dict[str, Any]]] = {}
        try:
            _measure(specs, options, scratch, rounds)
            stopped = False
        except KeyboardInterrupt:
            stopped = True
    rows = [results.merge_rounds(done) for done in rounds.values()]
    results.complete(rows, speeds)
    title = options.title or f"{' '.join(options.shapes)}, {options.batch} x {options.seq} tokens, {_ranks(options.world)}"
    result = {"format": results.FORMAT, "title": title, "command": _command(options), "probe": speeds, "rows": rows}
    result["machine"] = described
    path = options.out / f"{re.sub(r'[^a-zA-Z0-9.]+', '-', title).strip('-')}.json"
    results.save(path, result)
    report.write(path.with_suffix(".md"), [result])
    report.show(rows)
    print(f"saved {path}, .md and .svg")
    if options.docs:
        report.write(options.docs, [results.load(entry) for entry in sorted(options.out.glob("*.json"))])
    return 130 if stopped else _verdict(rows)


def _measure(
    specs: Sequence[Spec], options: argparse.Namespace, scratch: Path, rounds: dict[tuple[str, str], list[dict[str, Any]]]
) -> None:
    """Every engine once per round, so that a busy hour of the machine meets all of them. One that failed is not tried again."""
    for shape, number, spec in itertools.product(options.shapes, range(options.repeats), specs):
        done = rounds.get((shape, spec.text), [])
        if done and done[-1]["status"] != "ok":
            continue
        case = Case(
            shape=shape, batch=options.batch, seq=options.seq, steps=options.steps, warm=options.warm, world=options.world,
            timeout_s=options.timeout, profile=options.profile,
        )  # fmt: skip
        row = run_engine(spec, case, scratch / f"round{number}", options.logs or scratch / "logs")
        rounds.setdefault((shape, spec.text), []).append(row)
        times = row.get("times_s")
        said = f"{statistics.median(times):.4g} s/step" if times else f"{row['status']}: {row['error']}"
        print(f"{shape} {spec.text}: {said}", file=sys.stderr, flush=True)


def _stop(*_: object) -> None:
    raise KeyboardInterrupt


def _report(options: argparse.Namespace) -> int:
    found = [results.load(path) for path in options.report]
    for result in found:
        print(result["title"])
        report.show(result["rows"])
    if options.docs:
        report.write(options.docs, found)
    return max(_verdict(result["rows"]) for result in found)


def _verdict(rows: Sequence[dict[str, Any]]) -> int:
    wrong = disagreements(rows)
    for sentence in wrong:
        print(f"losses disagree: {sentence}", file=sys.stderr)
    if wrong:
        return 1
    return 0 if any(row["status"] == "ok" for row in rows) else 3


def _command(options: argparse.Namespace) -> str:
    """How to get the same rows. Folders are left out: they are of this machine, and results are published."""
    words = ["python", "-m", "bench", "--engines", *options.engines, "--shapes", *options.shapes]
    for name in ("batch", "seq", "steps", "warm", "repeats", "world"):
        words += [f"--{name}", str(getattr(options, name))]
    return shlex.join(words)


def _ranks(world: int) -> str:
    return "1 rank" if world == 1 else f"{world} ranks"


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected 1 or more, got {text}")
    return value
