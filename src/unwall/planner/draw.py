"""A chosen plan as a picture, and curves over logarithmic axes."""

import math
from collections.abc import Mapping, Sequence

from unwall.planner.choose import ChosenPlan
from unwall.planner.words import seconds
from unwall.svg import COLOURS, Picture
from unwall.tiers.sizes import format_bytes

BAR, ROW, LEFT, WIDTH = 26, 44, 150, 620


def plan_picture(plan: ChosenPlan) -> str:
    """Bytes per tier, each term a piece of a bar, and seconds per resource."""
    found = plan.prediction
    if found is None:
        raise ValueError("this plan was not predicted: there is nothing to draw")
    picture = Picture(LEFT + WIDTH + 90, title=f"{plan.model} on {plan.machine}: bytes of one of {plan.ranks} ranks")
    y = _tiers(picture, 44.0, {tier: terms for tier, terms in found.terms.items() if terms})
    picture.text(12, y, "seconds of each resource in a step", bold=True)
    times = {name: value for name, value in found.bound.seconds.items() if value} | {"step, simulated": found.step_s}
    y += 14
    for name, value in times.items():
        width = WIDTH * value / max(times.values())
        picture.text(LEFT - 8, y + 15, name, anchor="end")
        picture.box(LEFT, y, max(1.0, width), 20, COLOURS[1] if name == "step, simulated" else COLOURS[0])
        picture.text(LEFT + width + 6, y + 15, seconds(value))
        y += 26
    picture.height = y + 10
    return str(picture)


def _tiers(picture: Picture, y: float, tiers: Mapping[str, Mapping[str, int]]) -> float:
    """A bar for each tier, cut into its terms, and what the colours mean. Where the next thing goes."""
    names = list(dict.fromkeys(name for terms in tiers.values() for name in terms))
    colours = {name: COLOURS[number % len(COLOURS)] for number, name in enumerate(names)}
    for tier, terms in tiers.items():
        x, total = 12.0, sum(terms.values())
        picture.text(12, y - 4, f"{tier} {format_bytes(total)}")
        for name, nbytes in terms.items():
            width = (LEFT + WIDTH) * nbytes / total
            picture.box(x, y, width, BAR, colours[name], hover=f"{name}: {format_bytes(nbytes)}")
            x += width
        y += ROW
    for number, name in enumerate(names):
        x, row = 12 + (number % 3) * 260, y + 18 * (number // 3)
        picture.box(x, row - 10, 12, 12, colours[name])
        picture.text(x + 18, row, name)
    return y + 18 * math.ceil(len(names) / 3) + 24


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

    picture = Picture(left + width + 60, top + height + 50, title)
    picture.box(left, top, width, height, "none", edge="#999")
    for x in sorted({x for x, _ in listed}):
        at, _ = place(x, low_y)
        picture.line(at, top, at, top + height)
        picture.text(at, top + height + 16, f"{x:g}", anchor="middle")
    for number, (name, line) in enumerate(points.items()):
        colour = COLOURS[number]
        picture.curve([place(x, y) for x, y in line], colour, dashed=name in dashed)
        picture.text(left + 12, top + 20 + 16 * number, name, fill=colour)
        if name not in dashed:
            for x, y in line:
                a, b = place(x, y)
                picture.dot(a, b, colour)
                picture.text(a, b + 18, f"{y:.3g}", anchor="middle")
    picture.text(left + width / 2, top + height + 36, across, anchor="middle")
    picture.text(12, top - 10, down)
    return str(picture)
