"""A run of the suite as a file: rows, the machine, the command. What is derived from measured values is derived here."""

import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.bound import bound_seconds
from bench.shapes import SHAPES

FORMAT = 1


class ResultError(ValueError):
    """A file that is no result of the suite."""


def merge_rounds(rounds: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The rounds of one engine as one row: the steps of all of them. A round that failed makes the row a failure."""
    failed = next((row for row in rounds if row["status"] != "ok"), None)
    if failed is not None:
        return dict(failed)
    row = dict(rounds[0])  # the time to the first step is the first round's: later ones find what it compiled
    row["times_s"] = [seconds for entry in rounds for seconds in entry["times_s"]]
    row["processor_s"] = statistics.median(entry["processor_s"] for entry in rounds)
    row["host_peak_bytes"] = max(entry["host_peak_bytes"] for entry in rounds)
    if len(rounds) > 1:
        row["round_medians_s"] = [statistics.median(entry["times_s"]) for entry in rounds]
        row["round_first_step_s"] = [entry["first_step_s"] for entry in rounds]
    return row


def complete(rows: Sequence[dict[str, Any]], probe: Mapping[str, float]) -> None:
    """Adds to each finished row what follows from its times."""
    for row in rows:
        if row["status"] != "ok":
            continue
        shape, seconds = SHAPES[row["shape"]], statistics.median(row["times_s"])
        row["params"] = shape.params
        row["step_s"], row["step_min_s"], row["step_max_s"] = seconds, min(row["times_s"]), max(row["times_s"])
        row["tokens_per_s"] = row["world"] * row["batch"] * row["seq"] / seconds
        row["model_tflops"] = row["world"] * shape.flops(row["batch"], row["seq"]) / seconds / 1e12
        terms = bound_seconds(row, rows, probe)
        if terms:
            row["bound_s"], row["bound_by"] = max((value, name) for name, value in terms.items())
            row["bound_percent"] = 100 * row["bound_s"] / seconds


def save(path: Path, result: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")


def load(path: Path) -> dict[str, Any]:
    try:
        result = json.loads(path.read_text())
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ResultError(f"{path}: {error}") from error
    if not isinstance(result, dict) or result.get("format") != FORMAT or not isinstance(result.get("rows"), list):
        raise ResultError(f"{path} is no result of this suite (format {FORMAT}): write one with python -m bench --out DIR")
    return result
