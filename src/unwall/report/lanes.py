"""The time line of one step for the page: a row per lane, and what was waited for, in words."""

from collections.abc import Sequence
from html import escape

from unwall.report.chart import ticks
from unwall.report.timeline import busy_seconds, lanes_of, stalls
from unwall.tiers.lane import LaneSpan

_WIDTH, _ROW = 1000, 36
_MEANING = {
    "compute": "forward and backward",
    "stall": "compute waits",
    "collective": "between ranks",
    "host>device": "parameters arrive",
    "device>host": "gradients leave",
    "update": "the optimizer",
    "disk>host": "reads",
    "host>disk": "writes",
    "wait": "the step waits",
}
SHOWN_STALLS = 8


def lanes(spans: Sequence[LaneSpan]) -> str:
    """A row per lane; each box names its group. Names stay where they are while the rest is zoomed and scrolled (page.js)."""
    first, length = _extent(spans)
    names, rows, heads = lanes_of(spans), [], []
    for number, lane in enumerate(names):
        share = busy_seconds(spans, lane) / length
        heads.append(f"<li><b>{escape(lane)}</b><small>{share:.0%} {escape(_MEANING.get(lane, 'busy'))}</small></li>")
        boxes = []
        for span in (span for span in spans if span.lane == lane):
            left, width = _WIDTH * (span.start - first) / length, max(0.6, _WIDTH * (span.end - span.start) / length)
            hover = f"{lane}: {span.label}, {1e3 * (span.end - span.start):.2f} ms at {1e3 * (span.start - first):.2f} ms"
            place = f'x="{left:.2f}" y="{number * _ROW + 4}" width="{width:.2f}" height="{_ROW - 8}"'
            boxes.append(f"<rect {place}><title>{escape(hover)}</title></rect>")
        rows.append(f'<g class="span c{number % 8}{" stalled" if lane in ("stall", "wait") else ""}">{"".join(boxes)}</g>')
    height = _ROW * len(names)
    marks = [(value / length, _ms(value)) for value in ticks(0.0, length, 8) if value < 0.97 * length]
    grid = "".join(f'<path class="grid" d="M{_WIDTH * at:.1f},0V{height}"/>' for at, _ in marks)
    scale = "".join(f'<span style="left:{100 * at:.2f}%">{words}</span>' for at, words in marks)
    said = "; ".join(f"{lane} {busy_seconds(spans, lane) / length:.0%} busy" for lane in names)
    return (
        '<div class="zoom"><button type="button" data-zoom="in" aria-label="zoom in">+</button>'
        '<button type="button" data-zoom="out" aria-label="zoom out">&minus;</button>'
        '<span class="hint">keys: + and &minus; zoom, arrows scroll</span></div>'
        f'<div class="timeline"><ul class="names">{"".join(heads)}</ul>'
        '<div class="lanes" tabindex="0" role="group" aria-label="time line of one step"><div class="canvas">'
        f'<svg viewBox="0 0 {_WIDTH} {height}" preserveAspectRatio="none" style="height:{height}px" role="img" '
        f'aria-label="{escape(said)}">{grid}{"".join(rows)}</svg><div class="scale">{scale}</div></div></div></div>'
    )


def stall_table(spans: Sequence[LaneSpan]) -> str:
    """What compute waited for, the longest first."""
    _, length = _extent(spans)
    found = stalls(spans)
    if not found:
        return '<p class="good">Compute waited for nothing: everything that moved was hidden behind it.</p>'
    total = sum(seconds for _, seconds in found)
    rows = "".join(
        f'<tr><th scope="row">{escape(label)}</th><td>{_ms(seconds)}</td><td>{seconds / length:.1%}</td>'
        f'<td class="bar"><i style="width:{100 * seconds / found[0][1]:.1f}%"></i></td></tr>'
        for label, seconds in found[:SHOWN_STALLS]
    )
    more = f"<p>And {len(found) - SHOWN_STALLS} shorter ones.</p>" if len(found) > SHOWN_STALLS else ""
    return (
        f"<p>Compute waited {_ms(total)} in all, {total / length:.1%} of the step.</p>"
        '<table><thead><tr><th scope="col">waited for</th><th scope="col">time</th><th scope="col">of the step</th>'
        f"<th></th></tr></thead><tbody>{rows}</tbody></table>{more}"
    )


def _extent(spans: Sequence[LaneSpan]) -> tuple[float, float]:
    first = min(span.start for span in spans)
    return first, max(span.end for span in spans) - first or 1.0


def _ms(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 10 else f"{1e3 * seconds:,.4g} ms" if seconds < 1 else f"{1e3 * seconds:,.0f} ms"
