"""The time line of a run: which lane (compute, each link, updates, stalls) worked on which group, and when.

Pure functions over spans: a Chrome trace, a picture, a table.
"""

import html
import json
from collections.abc import Sequence
from pathlib import Path

from unwall.tiers.meter import LaneSpan

LANES = (
    "compute",
    "stall",
    "collective",
    "host>device",
    "device>host",
    "update",
    "disk>host",
    "host>disk",
    "wait",
)
"""From top to bottom; lanes that are not named here follow."""
_COLOURS = ("#4269d0", "#ff725c", "#9c6b4e", "#3ca951", "#efb118", "#a463f2", "#6cc5b0", "#97bbf5")
_WIDTH, _ROW, _LEFT, _TOP = 1400, 34, 110, 30


def lanes_of(spans: Sequence[LaneSpan]) -> list[str]:
    found = {span.lane for span in spans}
    return [lane for lane in LANES if lane in found] + sorted(found - set(LANES))


def busy_seconds(spans: Sequence[LaneSpan], lane: str) -> float:
    """Time in which at least one span of the lane was under way."""
    total, until = 0.0, float("-inf")
    for span in sorted((span for span in spans if span.lane == lane), key=lambda span: span.start):
        total += max(0.0, span.end - max(span.start, until))
        until = max(until, span.end)
    return total


def chrome_trace(spans: Sequence[LaneSpan]) -> str:
    """For chrome://tracing and Perfetto."""
    lanes = lanes_of(spans)
    events: list[dict[str, object]] = [
        {"ph": "M", "name": "thread_name", "pid": 0, "tid": number, "args": {"name": lane}} for number, lane in enumerate(lanes)
    ]
    first = min((span.start for span in spans), default=0.0)
    for span in spans:
        events.append(
            {
                "ph": "X",
                "name": span.label,
                "cat": span.lane,
                "pid": 0,
                "tid": lanes.index(span.lane),
                "ts": (span.start - first) * 1e6,
                "dur": (span.end - span.start) * 1e6,
            }
        )
    return json.dumps({"traceEvents": events})


def picture(spans: Sequence[LaneSpan], title: str = "") -> str:
    """The same as an SVG: one row a lane, one box a span, its name on hovering."""
    lanes = lanes_of(spans)
    first = min((span.start for span in spans), default=0.0)
    length = max((span.end for span in spans), default=1.0) - first or 1.0
    scale = (_WIDTH - _LEFT - 20) / length
    height = _TOP + _ROW * len(lanes) + 40
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height}" font-family="sans-serif" font-size="12">',
        f'<rect width="{_WIDTH}" height="{height}" fill="white"/>',
        f'<text x="{_LEFT}" y="18">{html.escape(title)}</text>',
    ]
    for number, lane in enumerate(lanes):
        top = _TOP + number * _ROW
        share = busy_seconds(spans, lane) / length
        parts.append(f'<text x="4" y="{top + 15}">{html.escape(lane)}</text>')
        parts.append(f'<text x="4" y="{top + 28}" fill="#777" font-size="10">{share:.0%} busy</text>')
        colour = _COLOURS[number % len(_COLOURS)]
        for span in spans:
            if span.lane == lane:
                left = _LEFT + (span.start - first) * scale
                width = max(0.5, (span.end - span.start) * scale)
                name = html.escape(f"{span.label}: {(span.end - span.start) * 1e3:.2f} ms")
                parts.append(
                    f'<rect x="{left:.2f}" y="{top + 2}" width="{width:.2f}" height="{_ROW - 8}" fill="{colour}" '
                    f'stroke="white" stroke-width="0.3"><title>{name}</title></rect>'
                )
    base = _TOP + _ROW * len(lanes) + 4
    for tick in range(11):
        left = _LEFT + (_WIDTH - _LEFT - 20) * tick / 10
        parts.append(f'<line x1="{left:.1f}" y1="{_TOP}" x2="{left:.1f}" y2="{base}" stroke="#ddd" stroke-width="0.5"/>')
        parts.append(f'<text x="{left - 14:.1f}" y="{base + 14}" fill="#555">{length * tick / 10 * 1e3:.0f} ms</text>')
    return "\n".join([*parts, "</svg>"])


def stalls(spans: Sequence[LaneSpan]) -> list[tuple[str, float]]:
    """What was waited for, the longest first."""
    found: dict[str, float] = {}
    for span in spans:
        if span.lane == "stall":
            found[span.label] = found.get(span.label, 0.0) + span.end - span.start
    return sorted(found.items(), key=lambda item: -item[1])


class Profile:
    """What ``unwall.profile`` recorded. Filled when its context is left."""

    def __init__(self) -> None:
        self.spans: list[LaneSpan] = []

    def save_trace(self, path: str | Path) -> None:
        """A Chrome trace (chrome://tracing, Perfetto)."""
        Path(path).write_text(chrome_trace(self.spans))

    def save_picture(self, path: str | Path, title: str = "") -> None:
        """The time line as an SVG."""
        Path(path).write_text(picture(self.spans, title))

    def busy(self) -> dict[str, float]:
        """Seconds each lane was busy."""
        return {lane: busy_seconds(self.spans, lane) for lane in lanes_of(self.spans)}

    def stalls(self) -> list[tuple[str, float]]:
        """What compute waited for, the longest first."""
        return stalls(self.spans)
