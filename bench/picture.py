"""Tokens a second of each engine as horizontal bars, in SVG written by hand: a GPU machine may have no plotting library."""

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

_WIDTH, _LABEL, _BAR, _GAP, _HEAD = 1100, 540, 18, 6, 34
_OURS, _PEER, _FAILED = "#1f6feb", "#8c959f", "#b35900"


def draw(results: Sequence[Mapping[str, Any]]) -> str:
    """One block of bars for each run and shape, each with a scale of its own."""
    parts: list[str] = []
    top = 10
    for result in results:
        for shape in dict.fromkeys(row["shape"] for row in result["rows"]):
            rows = [row for row in result["rows"] if row["shape"] == shape]
            parts.append(_text(10, top + 18, f"{result['title']}: {shape}, tokens/s", weight="bold"))
            top += _HEAD
            most = max((row["tokens_per_s"] for row in rows if row["status"] == "ok"), default=1.0)
            for row in rows:
                parts += _bar(row, top, most)
                top += _BAR + _GAP
            top += 14
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{top}" viewBox="0 0 {_WIDTH} {top}" '
        f'font-family="sans-serif" font-size="12">\n<rect width="100%" height="100%" fill="white"/>\n{body}\n</svg>\n'
    )


def _bar(row: Mapping[str, Any], top: int, most: float) -> list[str]:
    name = row["engine"] if len(row["engine"]) < 84 else row["engine"][:82] + "…"
    label = _text(_LABEL - 8, top + 13, name, anchor="end")
    if row["status"] != "ok":
        return [label, _text(_LABEL, top + 13, row["status"], fill=_FAILED)]
    width = max(1.0, (_WIDTH - _LABEL - 90) * row["tokens_per_s"] / most)
    fill = _OURS if row["engine"].startswith("unwall") else _PEER
    return [
        label,
        f'<rect x="{_LABEL}" y="{top}" width="{width:.1f}" height="{_BAR}" fill="{fill}"/>',
        _text(_LABEL + width + 6, top + 13, f"{row['tokens_per_s']:.0f}"),
    ]


def _text(x: float, y: float, text: str, *, anchor: str = "start", weight: str = "normal", fill: str = "#1f2328") -> str:
    return f'<text x="{x:.1f}" y="{y}" text-anchor="{anchor}" font-weight="{weight}" fill="{fill}">{escape(text)}</text>'
