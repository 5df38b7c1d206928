"""``unwall report``: one HTML page about a run, with everything in it: no network, no library."""

import math
import statistics
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from unwall.report.chart import Curve, Level, chart, near
from unwall.report.lanes import lanes, stall_table
from unwall.report.run import TIERS, ReportError, Run, is_number, read_run
from unwall.report.start import until_first_step
from unwall.tiers.sizes import format_bytes, parse_bytes

NAME = "report.html"
_ASSETS = Path(__file__).parent


def write_report(run_dir: str | Path, out: str | Path | None = None) -> Path:
    """Writes the page, into the run directory where nothing else is said, and gives its path. ReportError: it is no run."""
    run = read_run(run_dir)
    target = Path(run_dir, NAME) if out is None else Path(out)
    try:
        target.write_text(page(run), encoding="utf-8")
    except OSError as error:
        raise ReportError(f"{target}: cannot be written: {error.strerror}; give a file of your own with --out FILE") from None
    return target


def page(run: Run) -> str:
    """The whole page."""
    title = str(run.field("model", "name") or run.path.name)
    sections = [
        ("curves", "Loss and speed", _curves(run)),
        ("memory", "Memory per tier", _memory(run)),
        ("step", "One step", _step(run)),
        ("plan", "The plan and what was measured", _against_plan(run)),
        ("start", "Until the first step", until_first_step(run)),
        ("details", "Details", _details(run)),
    ]
    there = [(anchor, name, body) for anchor, name, body in sections if body]
    links = "".join(f'<a href="#{anchor}">{escape(name)}</a>' for anchor, name, _ in there)
    bodies = "".join(
        f'<section id="{a}" aria-labelledby="{a}-h"><h2 id="{a}-h">{escape(n)}</h2>{b}</section>' for a, n, b in there
    )
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><meta name="color-scheme" content="light dark">'
        f"<title>{escape(title)}: unwall report</title><style>{_asset('page.css')}</style></head><body>"
        '<a class="skip" href="#curves">Skip to the curves</a>'
        f'<header><div class="top"><p class="brand">unwall report</p><nav aria-label="Sections">{links}</nav>'
        '<button type="button" id="theme" aria-label="switch between light and dark">◐ <span>theme</span></button></div>'
        f"<h1>{escape(title)}</h1>{_answer(run)}{_cards(run)}{_problems(run)}</header><main>{bodies}</main>"
        f"<footer>{escape(str(run.path))}</footer><script>{_asset('page.js')}</script></body></html>\n"
    )


def _asset(name: str) -> str:
    return (_ASSETS / name).read_text(encoding="utf-8")


def _answer(run: Run) -> str:
    words = run.field("answer")
    return f'<p class="answer">{escape(str(words))}</p>' if words else ""


def _cards(run: Run) -> str:
    typical = [line for line in run.steps if not line.get("profiled")] or run.steps
    speed = _median(line.get("tokens_per_second") for line in typical)
    bound = _median(line.get("bound_fraction") for line in typical)
    seconds = [float(line["seconds"]) for line in run.steps if is_number(line.get("seconds"))]
    losses, total = run.values("loss"), run.number("steps")
    done = len(run.steps) if not is_number(run.steps[-1].get("step")) else int(run.steps[-1]["step"])
    cards = [
        ("status", str(run.field("status") or "unknown"), ""),
        ("steps", f"{done:,}", f"of {int(total):,}" if total is not None else ""),
        ("loss", f"{losses[-1][1]:.4f}" if losses else "", f"from {losses[0][1]:.4f}" if losses else ""),
        ("tokens per second", "" if speed is None else f"{speed:,.0f}", "median"),
        ("of the bound", "" if bound is None else f"{bound:.0%}", str(run.field("prediction", "bound_by") or "")),
        ("in steps", _clock(sum(seconds)) if seconds else "", f"{len(seconds):,} logged"),
    ]
    shown = "".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(value)}<small>{escape(more)}</small></dd></div>"
        for name, value, more in cards
        if value
    )
    return f'<dl class="cards">{shown}</dl>'


def _problems(run: Run) -> str:
    if not run.problems:
        return ""
    listed = "".join(f"<li>{escape(problem)}</li>" for problem in run.problems[:20])
    more = f"<li>and {len(run.problems) - 20} more</li>" if len(run.problems) > 20 else ""
    return f'<div class="problems" role="note"><p>Not everything could be read:</p><ul>{listed}{more}</ul></div>'


def _curves(run: Run) -> str:
    tested = [(float(line["step"]), float(line["loss"])) for line in run.evaluations if _both(line, "step", "loss")]
    curves = [Curve("loss", "c0", run.values("loss")), Curve("evaluation", "c1", tested, dots=True)]
    curves.append(Curve("plain PyTorch", "c1 thin", run.values("plain_loss"), dots=True))  # the demo's
    found = chart("Loss", curves, shown=lambda value: f"{value:.4g}")
    predicted, tokens = run.number("prediction", "tokens_per_s"), _median(line.get("tokens") for line in run.steps)
    bound_s = run.number("prediction", "bound_s")
    levels = [Level("predicted", "c2", predicted)] if predicted else []
    if tokens and bound_s:
        levels.append(Level("the bound", "c4", tokens / bound_s))
    speed = Curve("measured", "c0", run.values("tokens_per_second"))
    found += chart("Tokens per second", [speed], levels, shown=lambda value: f"{value:,.0f}", from_zero=True)
    norm = Curve("gradient norm", "c5", run.values("grad_norm"))
    found += chart("Gradient norm", [norm], shown=lambda value: f"{value:.3g}", from_zero=True)
    rate = Curve("learning rate", "c6", run.values("lr"))
    found += chart("Learning rate", [rate], shown=lambda value: f"{value:.2g}", from_zero=True)
    return f'<div class="grid2">{found}</div>'


def _memory(run: Run) -> str:
    found = ""
    for tier in TIERS:
        curves = [
            Curve("held", tier, run.values("live_bytes", tier)),
            Curve("peak so far", f"{tier} thin", run.values("peak_bytes", tier)),
        ]
        if tier == "device":
            curves.append(Curve("torch's peak, with activations", "c5 thin", run.values("allocated_bytes")))
        if not any(value for curve in curves for _, value in curve.points):
            continue
        levels = []
        for name, value in (("predicted", run.number("prediction", "peak_bytes", tier)), ("budget", _budget(run, tier))):
            if value:
                levels.append(Level(name, "c2" if name == "predicted" else "c7", value))
        found += chart(
            tier.capitalize(), curves, levels, shown=_bytes, from_zero=True, unit=_unit(curves, near(curves, levels))
        )
    stalled = [line["stall_seconds"] for line in run.steps if isinstance(line.get("stall_seconds"), dict)]
    links = sorted({str(link) for line in stalled for link in line})
    waits = [Curve(link, f"c{number % 8}", run.values("stall_seconds", link, 0.0)) for number, link in enumerate(links)]
    found += chart("Waiting for each link, seconds per step", waits, shown=lambda value: f"{value:.3g} s", from_zero=True)
    return f'<div class="grid2">{found}</div>' if found else ""


def _bytes(value: float) -> str:
    return format_bytes(int(value))


def _unit(curves: Sequence[Curve], levels: Sequence[Level]) -> float:
    """KiB, MiB, GiB ...: the largest that the chart reaches."""
    most = max([value for curve in curves for _, value in curve.points] + [level.value for level in levels] + [1.0])
    return 1024.0 ** int(math.log(most, 1024))


def _budget(run: Run, tier: str) -> float | None:
    value = run.field("plan", f"{tier}_bytes")
    try:
        return None if value is None else float(parse_bytes(value))
    except ValueError:
        return None


def _step(run: Run) -> str:
    if not run.spans:
        return ""
    profiled = next((line.get("step") for line in run.steps if line.get("profiled")), None)
    which = f" (step {profiled})" if profiled is not None else ""
    return (
        f"<p>What each link did while one step{which} was computed, on one rank. Recording slows a step down a little.</p>"
        f"{lanes(run.spans)}<h3>Stalls</h3>{stall_table(run.spans)}"
    )


def _against_plan(run: Run) -> str:
    typical = [line for line in run.steps[1:] if not line.get("profiled")] or run.steps
    seconds = _median(line.get("seconds") for line in typical)
    rows: list[tuple[str, str, str, str]] = []

    def add(name: str, predicted: float | None, measured: float | None, shown: Any) -> None:
        if predicted is not None or measured is not None:
            ratio = f"{measured / predicted:.2f}" if predicted and measured is not None else ""
            rows.append(
                (name, "" if predicted is None else shown(predicted), "" if measured is None else shown(measured), ratio)
            )

    add("least a step can take", run.number("prediction", "bound_s"), None, _seconds)
    add("step", run.number("prediction", "step_s"), seconds, _seconds)
    speed = _median(line.get("tokens_per_second") for line in typical)
    add("tokens per second", run.number("prediction", "tokens_per_s"), speed, lambda value: f"{value:,.0f}")
    for tier in TIERS:
        peaks = [value for _, value in run.values("peak_bytes", tier)]
        predicted = run.number("prediction", "peak_bytes", tier)
        if predicted or (peaks and max(peaks)):
            add(f"{tier}, peak", predicted, max(peaks) if peaks else None, _bytes)
    held = [value for _, value in run.values("allocated_bytes")]
    terms = run.field("prediction", "terms_bytes", "device")
    if held and isinstance(terms, dict):
        add("device, with activations", sum(filter(is_number, terms.values())), max(held), _bytes)
    if not any(row[1] for row in rows):
        return f"<p>There is no prediction in run.json to compare with.</p>{_table(rows)}" if rows else ""
    return _plan_line(run) + _table(rows)


def _table(rows: Sequence[tuple[str, str, str, str]]) -> str:
    body = "".join(
        f'<tr><th scope="row">{escape(name)}</th><td>{escape(p)}</td><td>{escape(m)}</td><td>{escape(r)}</td></tr>'
        for name, p, m, r in rows
    )
    heads = "".join(f'<th scope="col">{name}</th>' for name in ("", "predicted", "measured", "ratio"))
    return f"<table><thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table>"


def _plan_line(run: Run) -> str:
    plan = run.field("plan")
    if not isinstance(plan, dict) or not plan:
        return ""
    shown = ", ".join(f"{name}={_written(name, value)}" for name, value in plan.items())
    return f"<p><code>Plan({escape(shown)})</code></p>"


def _written(name: str, value: Any) -> str:
    return repr(format_bytes(value).replace(" ", "")) if name.endswith("_bytes") and isinstance(value, int) else repr(value)


def _details(run: Run) -> str:
    found = ""
    for name in ("command", "options", "model", "machine", "data", "versions"):
        value = run.field(name)
        if value:
            found += f"<details><summary>{name}</summary>{_nested(value)}</details>"
    return found


def _nested(value: Any) -> str:
    if isinstance(value, dict):
        rows = "".join(f'<tr><th scope="row">{escape(str(k))}</th><td>{_nested(v)}</td></tr>' for k, v in value.items())
        return f'<table class="fields"><tbody>{rows}</tbody></table>'
    if isinstance(value, list) and any(isinstance(entry, dict) for entry in value):
        return "".join(map(_nested, value))
    return escape(" ".join(map(str, value)) if isinstance(value, list) else str(value))


def _both(line: dict[str, Any], *names: str) -> bool:
    return all(is_number(line.get(name)) for name in names)


def _median(values: Any) -> float | None:
    found = [float(value) for value in values if is_number(value)]
    return statistics.median(found) if found else None


def _seconds(value: float) -> str:
    return f"{value:.3g} s" if value >= 1 else f"{1e3 * value:.3g} ms"


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s" if minutes else f"{seconds:.1f} s"
