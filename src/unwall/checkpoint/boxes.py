"""Which elements of a whole tensor lie somewhere: the only words in which a checkpoint speaks of parts. Pure arithmetic.

[Note: parts]
A part is a run of elements (``start``, ``numel``) of a box, counted in the box's own row-major order. A box is a block of
neighbouring indices of the whole tensor, in each of its dimensions. Where a tensor is only cut over data-parallel ranks the box
is the whole tensor, and a part is a run of its elements. Under tensor parallelism a rank's box is its rows or columns. Nothing
else about how a model was cut is ever written down, so whatever cuts it in another way finds its elements.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True)
class Box:
    """Neighbouring indices of a tensor: ``sizes[d]`` of them from ``offsets[d]`` on, in each dimension d."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @staticmethod
    def whole(shape: Sequence[int]) -> "Box":
        return Box((0,) * len(shape), tuple(shape))

    @property
    def numel(self) -> int:
        return math.prod(self.sizes)

    def fits(self, shape: Sequence[int]) -> bool:
        """Whether it is a box of a tensor of this shape."""
        return len(self.offsets) == len(self.sizes) == len(shape) and all(
            offset >= 0 and size >= 0 and offset + size <= length
            for offset, size, length in zip(self.offsets, self.sizes, shape, strict=True)
        )

    def intersection(self, other: "Box") -> "Box | None":
        """The indices that lie in both. None where there are none."""
        lows = tuple(map(max, self.offsets, other.offsets))
        highs = (min(a + m, b + n) for a, m, b, n in zip(self.offsets, self.sizes, other.offsets, other.sizes, strict=True))
        sizes = tuple(high - low for low, high in zip(lows, highs, strict=True))
        return Box(lows, sizes) if all(size > 0 for size in sizes) else None

    def position(self, index: Sequence[int]) -> int:
        """Where an index of the whole tensor lies in the box's row-major order."""
        found = 0
        for at, offset, size in zip(index, self.offsets, self.sizes, strict=True):
            found = found * size + at - offset
        return found


@dataclass(frozen=True)
class Part:
    """A run of a box's elements. See [Note: parts]."""

    box: Box
    start: int
    numel: int

    @staticmethod
    def whole(shape: Sequence[int]) -> "Part":
        return Part(Box.whole(shape), 0, math.prod(shape))

    @property
    def end(self) -> int:
        return self.start + self.numel


class Overlap(NamedTuple):
    """A run of elements that two parts share."""

    first: int
    """Where it begins in the first part, counted from that part's start."""
    second: int
    """The same in the second part."""
    numel: int


def overlaps(first: Part, second: Part) -> Iterator[Overlap]:
    """The runs of elements that two parts of the same tensor share, in order."""
    if first.box == second.box:
        start, end = max(first.start, second.start), min(first.end, second.end)
        if start < end:
            yield Overlap(start - first.start, start - second.start, end - start)
        return
    shared = first.box.intersection(second.box)
    if shared is None:
        return
    for index, length in _rows(shared, first.box, second.box):
        in_first, in_second = first.box.position(index), second.box.position(index)
        skip = max(0, first.start - in_first, second.start - in_second)
        stop = min(length, first.end - in_first, second.end - in_second)
        if skip < stop:
            yield Overlap(in_first + skip - first.start, in_second + skip - second.start, stop - skip)


def _rows(shared: Box, *boxes: Box) -> Iterator[tuple[tuple[int, ...], int]]:
    """The runs of a box that are runs in each of ``boxes``, too: the index of each one's first element, and its length."""
    depth = len(shared.sizes)
    while depth > 0 and all(box.sizes[depth - 1] == shared.sizes[depth - 1] for box in boxes):
        depth -= 1
    depth = max(0, depth - 1)  # within one index of this dimension, and of those before it, everything is one run
    length = math.prod(shared.sizes[depth:])
    outer = shared.sizes[:depth]
    for number in range(math.prod(outer)):
        index = list(shared.offsets)
        for dimension in reversed(range(depth)):
            number, at = divmod(number, outer[dimension])
            index[dimension] += at
        yield tuple(index), length


def uncovered(shape: Sequence[int], parts: Sequence[Part]) -> int:
    """How many elements of a tensor none of ``parts`` holds. ValueError where two of them hold the same element."""
    for at, part in enumerate(parts):
        for other in parts[at + 1 :] if len({part.box for part in parts}) > 1 else ():
            if next(overlaps(part, other), None) is not None:
                raise ValueError(f"{part} and {other} overlap")
    ordered = sorted(parts, key=lambda part: part.start)
    for left, right in itertools.pairwise(ordered):
        if left.box == right.box and left.end > right.start:
            raise ValueError(f"{left} and {right} overlap")
    return math.prod(shape) - sum(part.numel for part in parts)
