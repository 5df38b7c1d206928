"""The time line of a run: which lane (compute, each link, updates, stalls) worked on which group, and when.

Pure functions over spans: a Chrome trace, a picture, a table.
"""

import json
from collections.abc import Sequence
from pathlib import Path

from unwall.svg import COLOURS, FAINT, Picture
from unwall.tiers.lane import LaneSpan

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
    """The same as an SVG: one row per lane, one box per span, its name on hovering."""
    lanes = lanes_of(spans)
    first = min((span.start for span in spans), default=0.0)
    length = max((span.end for span in spans), default=1.0) - first or 1.0
    across, base = _WIDTH - _LEFT - 20, _TOP + _ROW * len(lanes) + 4
    found = Picture(_WIDTH, base + 36)
    found.text(_LEFT, 18, title)
    for number, lane in enumerate(lanes):
        top, colour = _TOP + number * _ROW, COLOURS[number % len(COLOURS)]
        found.text(4, top + 15, lane)
        found.text(4, top + 28, f"{busy_seconds(spans, lane) / length:.0%} busy", size=10, fill=FAINT)
        for span in spans:
            if span.lane == lane:
                seconds = span.end - span.start
                left, width = _LEFT + across * (span.start - first) / length, max(0.5, across * seconds / length)
                hover = f"{span.label}: {seconds * 1e3:.2f} ms"
                found.box(left, top + 2, width, _ROW - 8, colour, edge="white", thin=True, hover=hover)
    for tick in range(11):
        left = _LEFT + across * tick / 10
        found.line(left, _TOP, left, base)
        found.text(left - 14, base + 14, f"{length * tick / 10 * 1e3:.0f} ms", fill=FAINT)
    return str(found)


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
