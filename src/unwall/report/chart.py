"""Curves over steps as SVG whose colours come from the page, so that they follow its light and dark."""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

Points = Sequence[tuple[float, float]]
_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 720, 240, 64, 12, 12, 26
MAX_POINTS = 1200
"""More than there are pixels: neighbours are averaged."""
FAR = 8.0
"""How many times the largest value a level may be."""


@dataclass(frozen=True)
class Curve:
    """One line of a chart."""

    name: str
    colour: str
    """A CSS class: c0 to c7, or a tier's name."""
    points: Points
    dots: bool = False


@dataclass(frozen=True)
class Level:
    """A value to compare with, as a dashed line."""

    name: str
    colour: str
    value: float


def near(curves: Sequence[Curve], levels: Sequence[Level]) -> list[Level]:
    """The levels that are drawn. One far above all curves would press them to the ground: it is only named."""
    most = max((value for curve in curves for _, value in curve.points), default=0.0)
    return [level for level in levels if not 0 < FAR * most < level.value]


def thinned(points: Points, most: int = MAX_POINTS) -> list[tuple[float, float]]:
    """At most so many points: averages of neighbours."""
    if len(points) <= most:
        return list(points)
    size = math.ceil(len(points) / most)
    parts = [points[start : start + size] for start in range(0, len(points), size)]
    return [(part[-1][0], sum(value for _, value in part) / len(part)) for part in parts]


def ticks(low: float, high: float, about: int = 4) -> list[float]:
    """Round numbers between two others."""
    span = high - low
    if not span > 0:
        return [low]
    raw = span / about
    scale = 10.0 ** math.floor(math.log10(raw))
    step = next(scale * factor for factor in (1, 2, 2.5, 5, 10) if scale * factor >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [number * step for number in range(first, math.floor(high / step + 1e-9) + 1)]


def chart(
    title: str,
    curves: Sequence[Curve],
    levels: Sequence[Level] = (),
    *,
    shown: Callable[[float], str],
    from_zero: bool = False,
    unit: float = 1.0,
) -> str:
    """A figure with its legend. ``shown``: how a value is written; ``unit``: marks are round numbers of it.
    Arrow keys move along the steps (page.js)."""
    drawn = [Curve(curve.name, curve.colour, thinned(curve.points), curve.dots) for curve in curves if curve.points]
    if not drawn:
        return ""
    xs = [x for curve in drawn for x, _ in curve.points]
    ys = [y for curve in drawn for _, y in curve.points] + [level.value for level in near(drawn, levels)]
    left, right, low, high = min(xs), max(xs), 0.0 if from_zero else min(ys), max(ys)
    high = high if high > low else low + (abs(low) or 1.0) * 0.1
    low, high = low if from_zero else low - 0.04 * (high - low), high + 0.06 * (high - low)
    right = right if right > left else left + 1

    def at_x(x: float) -> float:
        return _LEFT + (_WIDTH - _LEFT - _RIGHT) * (x - left) / (right - left)

    def at_y(y: float) -> float:
        return _HEIGHT - _BOTTOM - (_HEIGHT - _TOP - _BOTTOM) * (y - low) / (high - low)

    parts = _grid(left, right, low, high, at_x, at_y, shown, unit)
    for level in near(drawn, levels):
        parts.append(f'<path class="level {level.colour}" d="M{_LEFT},{at_y(level.value):.1f}H{_WIDTH - _RIGHT}"/>')
    for curve in drawn:
        places = [f"{at_x(x):.1f},{at_y(y):.1f}" for x, y in curve.points]
        if len(places) > 1:
            parts.append(f'<polyline class="curve {curve.colour}" points="{" ".join(places)}"/>')
        if curve.dots or len(places) == 1:
            dots = (place.split(",") for place in places)
            parts += [f'<circle class="dot {curve.colour}" cx="{x}" cy="{y}" r="3.5"/>' for x, y in dots]
    parts.append('<path class="cursor" d=""/>')
    said = [{"name": c.name, "points": [[x, shown(y), round(at_x(x), 1)] for x, y in c.points]} for c in drawn]
    legend = "".join(f'<li><i class="swatch {c.colour}"></i>{escape(c.name)}</li>' for c in drawn)
    kept = near(drawn, levels)
    for level in levels:
        said_of = f"{level.name} {shown(level.value)}{'' if level in kept else ', above the chart'}"
        legend += f'<li><i class="swatch dashed {level.colour}"></i>{escape(said_of)}</li>'
    last = "; ".join(f"{c.name}: {shown(c.points[0][1])} at first, {shown(c.points[-1][1])} at last" for c in drawn)
    return (
        f'<figure class="chart"><figcaption>{escape(title)}</figcaption><ul class="legend">{legend}</ul>'
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" tabindex="0" role="img" aria-label="{escape(f"{title}. {last}")}" '
        f'data-top="{_TOP}" data-bottom="{_HEIGHT - _BOTTOM}" data-curves="{escape(json.dumps(said))}">{"".join(parts)}</svg>'
        '<p class="readout" aria-live="polite">&nbsp;</p></figure>'
    )


def _grid(
    left: float,
    right: float,
    low: float,
    high: float,
    at_x: Callable[[float], float],
    at_y: Callable[[float], float],
    shown: Callable[[float], str],
    unit: float,
) -> list[str]:
    parts = []
    for value in (unit * number for number in ticks(low / unit, high / unit)):
        y = at_y(value)
        parts.append(f'<path class="grid" d="M{_LEFT},{y:.1f}H{_WIDTH - _RIGHT}"/>')
        parts.append(f'<text class="tick end" x="{_LEFT - 8}" y="{y + 4:.1f}">{escape(shown(value))}</text>')
    whole = sorted({round(value) for value in ticks(left, right, 6)})
    for value in (number for number in whole if left <= number <= right):
        parts.append(f'<text class="tick middle" x="{at_x(value):.1f}" y="{_HEIGHT - 8}">{value:,}</text>')
    return parts
