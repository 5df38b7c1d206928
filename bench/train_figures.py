"""What runs of `unwall train` measured, as the rows of docs/train.md.

    python -m bench.train_figures results/train-8b results/lora-13b

A directory holds the run.json and log.jsonl of a run (`tools/gpu_check train` copies them there).
"""

import statistics
import sys
from pathlib import Path

from unwall.report.run import Run, read_run
from unwall.tiers.sizes import format_bytes

HEAD = (
    "| run | parameters | tokens per step | s per step | promised | tokens/s | states on device | torch on device | host |\n"
    "|---|---|---|---|---|---|---|---|---|"
)


def row(run: Run) -> str:
    """Medians over the steps behind the first; the one that was recorded does not count."""
    typical = [line for line in run.steps[1:] if not line.get("profiled")] or run.steps
    seconds = statistics.median(line["seconds"] for line in typical)
    promised = run.number("prediction", "step_s")
    cells = [
        run.path.name,
        f"{(run.number('model', 'params') or 0) / 1e9:.2f} B",
        f"{statistics.median(line['tokens'] for line in typical):,.0f}",
        f"{seconds:.3g} ({min(line['seconds'] for line in typical):.3g} to {max(line['seconds'] for line in typical):.3g})",
        "" if promised is None else f"{promised:.3g}",
        f"{statistics.median(line['tokens_per_second'] for line in typical):,.0f}",
        _most(run, "peak_bytes", "device"),
        _most(run, "allocated_bytes"),
        _most(run, "peak_bytes", "host"),
    ]
    return f"| {' | '.join(cells)} |"


def _most(run: Run, name: str, part: str | None = None) -> str:
    found = [value for _, value in run.values(name, part)]
    return format_bytes(int(max(found))) if found else ""


def first_step(run: Run) -> str:
    """Where the time from the command to the end of its first step went."""
    if not run.starts:
        return f"{run.path.name}: no line of the kind start in its log"
    line = run.starts[0]
    parts = ", ".join(f"{name} {seconds:.1f}" for name, seconds in line["parts"].items() if seconds >= 0.05)
    return f"{run.path.name}: first step after {line['seconds']:.1f} s: {parts}"


def main() -> None:
    runs = [read_run(Path(name)) for name in sys.argv[1:]]
    print("\n".join([HEAD, *map(row, runs), "", *map(first_step, runs)]))


if __name__ == "__main__":
    main()
