"""Pictures as SVG, written by hand: bars and curves need no plotting library."""

import math
from collections.abc import Mapping, Sequence
from html import escape

from unwall.planner.choose import ChosenPlan
from unwall.planner.report import seconds
from unwall.tiers.sizes import format_bytes

COLOURS = ("#1b6ca8", "#d1495b", "#2e8b57", "#8a5a9e", "#c97b12", "#5b6770", "#3aa6a0", "#a8743b", "#b0306a", "#6d7f2c")
BAR, ROW, LEFT, WIDTH = 26, 44, 150, 620


def frame(width: float, height: float, title: str, lines: Sequence[str]) -> str:
    """A whole picture."""
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}"',
        ' font-family="sans-serif" font-size="12">',
        f'<rect width="{width:.0f}" height="{height:.0f}" fill="white"/>',
        f'<text x="12" y="20" font-size="14">{escape(title)}</text>',
    )
    return "\n".join([*head, *lines, "</svg>", ""])


def plan_picture(plan: ChosenPlan) -> str:
    """Bytes a tier, each term a piece of a bar, and seconds a resource."""
    found = plan.prediction
    if found is None:
        raise ValueError("this plan was not predicted: there is nothing to draw")
    tiers = {tier: terms for tier, terms in found.terms.items() if terms}
    names = list(dict.fromkeys(name for terms in tiers.values() for name in terms))
    colours = {name: COLOURS[number % len(COLOURS)] for number, name in enumerate(names)}
    lines, y = [], 44.0
    for tier, terms in tiers.items():
        lines += stack(y, f"{tier} {format_bytes(sum(terms.values()))}", terms, colours)
        y += ROW
    for number, name in enumerate(names):
        x, row = 12 + (number % 3) * 260, y + 18 * (number // 3)
        lines.append(f'<rect x="{x}" y="{row - 10:.0f}" width="12" height="12" fill="{colours[name]}"/>')
        lines.append(f'<text x="{x + 18}" y="{row:.0f}">{escape(name)}</text>')
    y += 18 * math.ceil(len(names) / 3) + 24
    lines.append(f'<text x="12" y="{y:.0f}" font-weight="bold">seconds of each resource in a step</text>')
    times = {name: value for name, value in found.bound.seconds.items() if value} | {"step, simulated": found.step_s}
    y += 14
    for name, value in times.items():
        colour = COLOURS[1] if name == "step, simulated" else COLOURS[0]
        width = WIDTH * value / max(times.values())
        lines.append(f'<text x="{LEFT - 8}" y="{y + 15:.0f}" text-anchor="end">{escape(name)}</text>')
        lines.append(f'<rect x="{LEFT}" y="{y:.0f}" width="{max(1.0, width):.1f}" height="20" fill="{colour}"/>')
        lines.append(f'<text x="{LEFT + width + 6:.1f}" y="{y + 15:.0f}">{seconds(value)}</text>')
        y += 26
    return frame(LEFT + WIDTH + 90, y + 10, f"{plan.model} on {plan.machine}: bytes of one of {plan.ranks} ranks", lines)


def stack(y: float, label: str, terms: Mapping[str, int], colours: Mapping[str, str]) -> list[str]:
    """One bar, cut into its terms."""
    lines, x, total = [f'<text x="12" y="{y - 4:.0f}">{escape(label)}</text>'], 12.0, sum(terms.values())
    for name, nbytes in terms.items():
        width = (LEFT + WIDTH) * nbytes / total
        shown = f"<title>{escape(name)}: {format_bytes(nbytes)}</title>"
        place = f'x="{x:.1f}" y="{y:.0f}" width="{width:.1f}" height="{BAR}"'
        lines.append(f'<rect {place} fill="{colours[name]}">{shown}</rect>')
        x += width
    return lines


def curves(
    title: str, across: str, down: str, points: Mapping[str, Sequence[tuple[float, float]]], dashed: Sequence[str] = ()
) -> str:
    """Lines over a logarithmic axis, both ways."""
    width, height, left, top = 460, 300, 70, 50
    listed = [point for line in points.values() for point in line]
    low_x, high_x = min(x for x, _ in listed), max(x for x, _ in listed)
    low_y, high_y = min(y for _, y in listed) / 1.2, max(y for _, y in listed) * 1.2

    def place(x: float, y: float) -> tuple[float, float]:
        at = math.log(x / low_x) / math.log(high_x / low_x), math.log(y / low_y) / math.log(high_y / low_y)
        return left + width * at[0], top + height * (1 - at[1])

    lines = [f'<rect x="{left}" y="{top}" width="{width}" height="{height}" fill="none" stroke="#999"/>']
    for x in sorted({x for x, _ in listed}):
        at, _ = place(x, low_y)
        lines.append(f'<line x1="{at:.1f}" x2="{at:.1f}" y1="{top}" y2="{top + height}" stroke="#ddd"/>')
        lines.append(f'<text x="{at:.1f}" y="{top + height + 16}" text-anchor="middle">{x:g}</text>')
    for number, (name, line) in enumerate(points.items()):
        colour, style = COLOURS[number], ' stroke-dasharray="6 4"' if name in dashed else ""
        path = " ".join(f"{a:.1f},{b:.1f}" for a, b in (place(x, y) for x, y in line))
        lines.append(f'<polyline fill="none" stroke="{colour}" stroke-width="2"{style} points="{path}"/>')
        lines.append(f'<text x="{left + 12}" y="{top + 20 + 16 * number}" fill="{colour}">{escape(name)}</text>')
        if name not in dashed:
            for x, y in line:
                a, b = place(x, y)
                lines.append(f'<circle cx="{a:.1f}" cy="{b:.1f}" r="3" fill="{colour}"/>')
                lines.append(f'<text x="{a:.1f}" y="{b + 18:.1f}" text-anchor="middle">{y:.3g}</text>')
    lines.append(f'<text x="{left + width / 2}" y="{top + height + 36}" text-anchor="middle">{escape(across)}</text>')
    lines.append(f'<text x="12" y="{top - 10}">{escape(down)}</text>')
    return frame(left + width + 60, top + height + 50, title, lines)
