"""Matches of a box of a tensor, from matches of the whole: what a tensor rank holds of a parameter is boxes of it.

[Note: within a box]
The loops of a match walk through the flattened tensor. Each of them is taken apart until it stays in one dimension: then a box
says which of its iterations lie inside, and the same loop walks through the flattened box. A loop that does not fit the
dimensions (rows of another shape, say) is run one iteration at a time.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from unwall.checkpoint.boxes import Box
from unwall.checkpoint.match import Match, row_major


class _Loop(NamedTuple):
    """A loop of a match that stays in one dimension."""

    extent: int
    dim: int
    step: int
    """Indices of the dimension from one iteration to the next."""
    far: int


def within(match: Match, shape: Sequence[int], box: Box) -> Iterator[Match]:
    """The parts of a match whose near side, a tensor of this shape, lies in a box. Their near side is the flattened box."""
    start = _index(match.near_start, shape)
    loops = _loops(match, shape, start)
    inside = None if loops is None else _narrowed(loops, start, box)
    if inside is None:
        for number in range(match.extents[0]):
            yield from within(match.narrow(0, number, 1).simplified(), shape, box)
        return
    strides, skipped = row_major(box.sizes), sum(skip * loop.far for loop, skip, _ in inside)
    if all(count > 0 for *_, count in inside) and _holds(box, start, {loop.dim for loop, *_ in inside}):
        for loop, skip, _ in inside:
            start[loop.dim] += skip * loop.step
        yield Match(
            tuple(count for *_, count in inside),
            box.position(start),
            tuple(loop.step * strides[loop.dim] for loop, *_ in inside),
            match.far,
            match.far_start + skipped,
            tuple(loop.far for loop, *_ in inside),
        ).simplified()


def _index(position: int, shape: Sequence[int]) -> list[int]:
    found = []
    for stride in row_major(shape):
        at, position = divmod(position, stride)
        found.append(at)
    return found


def _loops(match: Match, shape: Sequence[int], start: Sequence[int]) -> list[_Loop] | None:
    """None where one of them does not fit the dimensions."""
    strides, reach, found = row_major(shape), list(start), []
    for extent, near, far in zip(match.extents, match.near_strides, match.far_strides, strict=True):
        while extent > 1:
            dim = next((dim for dim, stride in enumerate(strides) if stride <= near and shape[dim] > 1), None)
            if dim is None or near % strides[dim]:
                return None
            step = near // strides[dim]
            count = extent
            if reach[dim] + (extent - 1) * step >= shape[dim]:  # it goes on in the dimension before
                count = shape[dim] // step
                if start[dim] or shape[dim] % step or extent % count or count < 2:
                    return None
            reach[dim] += (count - 1) * step
            if reach[dim] >= shape[dim]:
                return None
            found.append(_Loop(count, dim, step, far))
            extent, near, far = extent // count, near * count, far * count
    return found


def _narrowed(loops: list[_Loop], start: Sequence[int], box: Box) -> list[tuple[_Loop, int, int]] | None:
    """Of each loop how many iterations come before the box, and how many lie inside. None where loops share a dimension that
    the box cuts."""
    found = []
    for loop in loops:
        at, low = start[loop.dim], box.offsets[loop.dim]
        high = low + box.sizes[loop.dim]
        if sum(other.dim == loop.dim for other in loops) > 1:
            last = at + sum((other.extent - 1) * other.step for other in loops if other.dim == loop.dim)
            if last >= low and at < high and not (low <= at and last < high):
                return None
            found.append((loop, 0, loop.extent if low <= at and last < high else 0))
            continue
        skip = max(0, -((at - low) // loop.step))
        stop = min(loop.extent, -((at - high) // loop.step))
        found.append((loop, skip, max(0, stop - skip)))
    return found


def _holds(box: Box, start: Sequence[int], walked: set[int]) -> bool:
    """Whether the start lies in the box, in every dimension that no loop walks through."""
    return all(
        dim in walked or offset <= at < offset + size
        for dim, (at, offset, size) in enumerate(zip(start, box.offsets, box.sizes, strict=True))
    )
