"""Rows as tables: on the terminal, in Markdown, and as the page in docs/."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench import bound, losses
from bench.picture import draw

COLUMNS = (
    "shape", "engine", "s/step", "min to max", "tokens/s", "TFLOP/s", "% of bound", "device GiB", "host GiB",
    "GiB to disk per step", "s to 1st step", "loss",
)  # fmt: skip

_COLUMN_TEXT = """\
*s/step* is the median over the timed steps; tokens/s and model TFLOP/s (recomputation not counted) are those of all ranks.
*device* is the peak of torch's allocator on the rank with most; *host* the resident memory of all processes at its peak,
page-locked memory included. *to disk* is counted by the engine, or by the kernel for engines that do not count. *s to 1st step*
runs from the start of the process to the end of the first step, with everything that is compiled on the way (first round)."""


def cells(row: Mapping[str, Any]) -> list[str]:
    """One row as text. A failed one says why behind its name."""
    head = [row["shape"], row["engine"]]
    if row["status"] != "ok":
        peak = f"{row['host_peak_bytes'] / 2**30:.1f}" if row.get("host_peak_bytes") else ""
        return [*head, row["status"], "", "", "", "", "", peak, "", "", row["error"]]
    device, written, percent = row.get("device_peak_bytes"), row["disk_written_bytes"], row.get("bound_percent")
    return [
        *head,
        f"{row['step_s']:.4g}",
        f"{row['step_min_s']:.4g} to {row['step_max_s']:.4g}",
        f"{row['tokens_per_s']:.0f}",
        f"{row['model_tflops']:.3g}",
        f"{percent:.0f} ({row['bound_by']})" if percent is not None else "",
        f"{device / 2**30:.1f}" if device is not None else "",
        f"{row['host_peak_bytes'] / 2**30:.1f}",
        f"{written / 2**30:.2f}" if written is not None else "",
        f"{row['first_step_s']:.1f}",
        f"{row['losses'][0]:.4f} to {row['losses'][-1]:.4f}",
    ]


def show(rows: Sequence[Mapping[str, Any]]) -> None:
    """On the terminal, as Markdown where rich is not installed."""
    try:
        from rich.console import Console
        from rich.markup import escape
        from rich.table import Table
    except ImportError:
        print(markdown_table(rows))
        return
    table, console = Table(*COLUMNS), Console(width=170)
    failed = [row for row in rows if row["status"] != "ok"]
    for row in rows:
        shown = cells(row) if row["status"] == "ok" else [*cells(row)[:-1], "see below"]
        table.add_row(*map(escape, shown), style=None if row["status"] == "ok" else "yellow")
    console.print(table)
    for row in failed:
        console.print(escape(f"{row['shape']} {row['engine']}: {row['status']}: {row['error']}"), style="yellow")
    for sentence in ratios(rows):
        console.print(escape(sentence))


def ratios(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Each of our engines against its peers, a sentence each."""
    compared = [(ours, against(ours, rows)) for ours in _ours(rows)]
    return [f"{ours['shape']}: the speed of {ours['engine']} is {', '.join(said)}." for ours, said in compared if said]


def against(ours: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """One of our engines against the peers that keep the optimizer's state on the same tier and were given the same work."""
    return [
        f"{peer['step_s'] / ours['step_s']:.2f} times {peer['engine']}"
        for peer in rows
        if peer["status"] == "ok" and not _is_ours(peer) and _work(peer) == _work(ours) and peer["tier"] == ours["tier"]
    ]


def of_resident(ours: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> str:
    """Its speed in percent of our own with everything on the device, where the run has that."""
    resident = [row for row in _ours(rows) if row["tier"] == "device" and _work(row) == _work(ours)]
    if ours["tier"] == "device" or not resident:
        return ""
    return f"{100 * min(row['step_s'] for row in resident) / ours['step_s']:.1f}"


def _ours(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    return [row for row in rows if row["status"] == "ok" and _is_ours(row)]


def _is_ours(row: Mapping[str, Any]) -> bool:
    return bool(row["engine"].startswith("unwall"))


def _work(row: Mapping[str, Any]) -> list[Any]:
    return [row[key] for key in ("shape", "batch", "seq", "world")]


def markdown_table(rows: Sequence[Mapping[str, Any]]) -> str:
    lines = ["| " + " | ".join(COLUMNS) + " |", "|" + "---|" * len(COLUMNS)]
    lines += ["| " + " | ".join(cell.replace("|", "\\|") for cell in cells(row)) + " |" for row in rows]
    return "\n".join(lines)


def section(result: Mapping[str, Any]) -> str:
    """One run: the machine, the command, the table, whether the losses agree."""
    machine, rows = result["machine"], result["rows"]
    finished = [row for row in rows if row["status"] == "ok"]
    lines = [f"## {result['title']}", "", f"Machine: {_machine(machine)}. Date: {machine['date']}."]
    if machine.get("commit"):
        lines[-1] += f" Commit: {machine['commit']}."
    if machine.get("load") is not None:
        lines[-1] += f" Processes that wanted a core before the run (load average): {machine['load']:.1f}."
    if result.get("probe"):
        lines.append("Measured speeds: " + ", ".join(_speed(*item) for item in result["probe"].items()) + ".")
    lines += ["", "```", result["command"], "```", "", markdown_table(rows), ""]
    if finished:
        lines.append(
            f"Timed steps per engine: {len(finished[0]['times_s'])}, after {finished[0]['warm']} untimed ones in each round."
        )
        busy = ", ".join(f"{row['engine']} {row['processor_s']:.3g}" for row in finished)
        lines.append(f"Processor seconds per step, of all ranks and threads: {busy}.")
        versions = {f"{row['engine'].split(':')[0]} {row['versions']['engine']}" for row in finished}
        first = finished[0]["versions"]
        lines.append(f"Versions: Python {first['python']}, torch {first['torch']}; {', '.join(sorted(versions))}.")
        wrong = losses.disagreements(rows)
        lines.append("Losses **disagree**: " + "; ".join(wrong) + "." if wrong else "Losses agree.")
    lines += ["", *ratios(rows)]
    rounds = [row for row in finished if "round_medians_s" in row]
    if rounds:
        lines += ["", "Median of each round, in turn (s/step): " + "; ".join(
            f"{row['engine']} {', '.join(f'{seconds:.4g}' for seconds in row['round_medians_s'])}" for row in rounds
        ) + "."]  # fmt: skip
    return "\n".join(lines) + "\n"


def overview(results: Sequence[Mapping[str, Any]]) -> str:
    """Our rows of every run, together, with what each is to be held against."""
    columns = ("run", "engine", "s/step", "tokens/s", "host GiB", "speed against peers in the same run", "% of our resident")
    lines = ["## Overview", "", "| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    for result in results:
        rows = result["rows"]
        for row in _ours(rows):
            shown = dict(zip(COLUMNS, cells(row), strict=True))
            found = [result["title"], *(shown[name] for name in ("engine", "s/step", "tokens/s", "host GiB"))]
            lines.append("| " + " | ".join([*found, ", ".join(against(row, rows)), of_resident(row, rows)]) + " |")
    return "\n".join(lines) + "\n"


def page(results: Sequence[Mapping[str, Any]], picture: str) -> str:
    """The whole page."""
    head = [
        "# Benchmarks",
        "",
        "Written by `python -m bench --report bench/results/*.json --docs docs/benchmarks.md`; do not edit.",
        "",
        "The reference workload: a Llama-shaped decoder (`bench/workload.py`), bf16 compute, fp32 master AdamW, clipping",
        "at 1.0 unless the engine's name says otherwise, recomputation per block. Each engine runs in processes of its own.",
        "",
        _COLUMN_TEXT,
        "",
        bound.TEXT,
        "",
        losses.TEXT,
        "",
        f"![tokens per second of each engine]({picture})",
        "",
    ]
    return "\n".join(head) + "\n" + "\n".join([overview(results), *(section(result) for result in results)])


def write(path: Path, results: Sequence[Mapping[str, Any]]) -> None:
    """The page at ``path`` and its picture beside it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    picture = path.with_suffix(".svg")
    picture.write_text(draw(results))
    path.write_text(page(results, picture.name))


def _machine(machine: Mapping[str, Any]) -> str:
    devices = ", ".join(machine["devices"]) or "no accelerator"
    return (
        f"{machine['processor']}, {machine['cores']} cores, {machine['host_bytes'] / 2**30:.0f} GiB of host memory, {devices}"
    )


def _speed(name: str, value: float) -> str:
    return f"{name.removesuffix('_bytes_per_s').replace('_', ' ')} {value / 1e9:.3g} GB/s"
