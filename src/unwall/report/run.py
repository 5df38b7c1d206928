"""What a run directory holds, read with tolerance: fields may be missing, lines may be broken."""

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from unwall.json_files import read_json
from unwall.tiers.lane import LaneSpan

LOG, RUN, PROFILE = "log.jsonl", "run.json", "profile.json"
TIERS = ("device", "host", "disk")


class ReportError(ValueError):
    """A directory of which no report can be written: says what it lacks."""


@dataclass
class Run:
    """One run. See [Note: what a run directory holds] in ``unwall.train``."""

    path: Path
    said: dict[str, Any]
    """``run.json``; empty where there is none."""
    steps: list[dict[str, Any]]
    evaluations: list[dict[str, Any]]
    spans: list[LaneSpan]
    """The time line of one step."""
    starts: list[dict[str, Any]] = field(default_factory=list)
    """One line per start: where the time until its first step went."""
    problems: list[str] = field(default_factory=list)
    """What could not be read, in words."""

    def values(self, name: str, part: str | None = None, missing: float | None = None) -> list[tuple[float, float]]:
        """``(step, value)`` of a field, or of a part of one that is an object, wherever it is there and finite.
        ``missing``: what a part that an object does not name stands for."""
        found = []
        for number, line in enumerate(self.steps, 1):
            value = line.get(name)
            if part is not None:
                value = value.get(part, missing) if isinstance(value, dict) else None
            if value is not None and is_number(value):
                found.append((step_of(line, number), float(value)))
        return found

    def field(self, *names: str) -> Any:
        """A field of ``run.json``, at any depth. None where it is not there."""
        found: Any = self.said
        for name in names:
            found = found.get(name) if isinstance(found, dict) else None
        return found

    def number(self, *names: str) -> float | None:
        """The same, where it is a number."""
        found = self.field(*names)
        return float(found) if is_number(found) else None


def is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def step_of(line: dict[str, Any], number: int) -> float:
    """The step that a line is of; its place in the file where it does not say."""
    return float(line["step"]) if is_number(line.get("step")) else float(number)


def read_run(path: str | Path) -> Run:
    """ReportError for a directory that is no run, or a run without a step."""
    path = Path(path)
    if not path.is_dir():
        what = "is a file: give the directory of a run" if path.exists() else "no such directory"
        raise ReportError(f"{path}: {what}, as `unwall train --out` writes it")
    if not (path / LOG).is_file():
        raise ReportError(f"{path}: is not the directory of a run: there is no {LOG} in it, as `unwall train --out` writes it")
    problems: list[str] = []
    lines = list(_lines(path / LOG, problems))
    steps = [line for line in lines if line.get("kind", "step") == "step"]
    if not steps:
        broken = f" ({problems[0]})" if problems else ""
        raise ReportError(f"{path / LOG}: there is no step in it yet{broken}: try again once the run has taken one")
    said = _said(path / RUN, problems)
    tested, starts = ([line for line in lines if line.get("kind") == kind] for kind in ("eval", "start"))
    return Run(path, said, steps, tested, _spans(path / PROFILE, problems), starts, problems)


def _lines(path: Path, problems: list[str]) -> Iterator[dict[str, Any]]:
    with path.open(encoding="utf-8", errors="replace") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                found = json.loads(line)
            except (ValueError, RecursionError):
                problems.append(f"{path.name}, line {number}: is not JSON")
                continue
            if isinstance(found, dict):
                yield found
            else:
                problems.append(f"{path.name}, line {number}: is not an object")


def _said(path: Path, problems: list[str]) -> dict[str, Any]:
    if not path.is_file():
        problems.append(f"{path.name}: is missing, so the plan is not known")
        return {}
    try:
        found = read_json(path, ReportError)
    except ReportError as error:
        problems.append(str(error).replace(f"{path}", path.name))
        return {}
    return found if isinstance(found, dict) else {}


def _spans(path: Path, problems: list[str]) -> list[LaneSpan]:
    """From a Chrome trace as ``Profile.save_trace`` writes it."""
    if not path.is_file():
        return []
    try:
        events = read_json(path, ReportError)["traceEvents"]
        return [
            LaneSpan(str(event["cat"]), str(event["name"]), event["ts"] / 1e6, (event["ts"] + event["dur"]) / 1e6)
            for event in events
            if event.get("ph") == "X"
        ]
    except (ReportError, KeyError, TypeError, AttributeError) as error:
        what = str(error) if isinstance(error, ReportError) else "is not a Chrome trace"
        problems.append(f"{path.name}: {what.rpartition(': ')[2]}")
        return []
