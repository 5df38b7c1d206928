"""Which elements of a tensor in a file are which elements of a tensor in the model.

[Note: matches]
Most tensors in a file are a tensor of the model: element i here is element i there. Where one side packs several tensors into
one (experts, projections), a tensor is made of boxes of others, some of them transposed. Each box is a nest of loops that walks
through both sides, with a stride for each side and loop. A rank needs what lies in a range of one side: ``cut`` takes the part
of a nest that does, as a few smaller nests. So bytes go from a file to their shard (or back) without any tensor being whole.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace


def row_major(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of a contiguous tensor."""
    strides, step = [], 1
    for extent in reversed(shape):
        strides.append(step)
        step *= extent
    return tuple(reversed(strides))


@dataclass(frozen=True)
class Match:
    """See [Note: matches]. ``near`` is the side that is cut, ``far`` the other one; all in elements of flattened tensors."""

    extents: tuple[int, ...]
    near_start: int
    near_strides: tuple[int, ...]
    far: str
    """The name of the tensor on the far side."""
    far_start: int
    far_strides: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.extents)

    @property
    def near_span(self) -> int:
        """Elements from the first to the last one on the near side."""
        return 1 + sum((extent - 1) * stride for extent, stride in zip(self.extents, self.near_strides, strict=True))

    @property
    def far_span(self) -> int:
        """The same on the far side."""
        return 1 + sum((extent - 1) * stride for extent, stride in zip(self.extents, self.far_strides, strict=True))

    @property
    def is_run(self) -> bool:
        """Neighbours on one side are neighbours on the other."""
        return self.numel == 1 or (self.near_strides == (1,) and self.far_strides == (1,))

    def narrow(self, loop: int, start: int, count: int) -> "Match":
        """Some iterations of one loop."""
        return replace(
            self,
            extents=(*self.extents[:loop], count, *self.extents[loop + 1 :]),
            near_start=self.near_start + start * self.near_strides[loop],
            far_start=self.far_start + start * self.far_strides[loop],
        )

    def turned(self, near: str) -> "Match":
        """Near and far exchanged; ``near`` is the name of what is near now."""
        return Match(self.extents, self.far_start, self.far_strides, near, self.near_start, self.near_strides).simplified()

    def simplified(self) -> "Match":
        """The same with the fewest loops, the outermost on the near side first."""
        loops = sorted(
            ((e, n, f) for e, n, f in zip(self.extents, self.near_strides, self.far_strides, strict=True) if e != 1),
            key=lambda loop: -loop[1],
        )
        joined: list[tuple[int, int, int]] = []
        for extent, near, far in loops:
            if joined and joined[-1][1] == extent * near and joined[-1][2] == extent * far:
                joined[-1] = (joined[-1][0] * extent, near, far)
            else:
                joined.append((extent, near, far))
        extents, nears, fars = (tuple(column) for column in zip(*joined, strict=True)) if joined else ((), (), ())
        return replace(self, extents=extents, near_strides=nears, far_strides=fars)


def cut(match: Match, low: int, high: int) -> Iterator[Match]:
    """The parts of a simplified match that lie in elements ``low`` to ``high`` of the near side."""
    first, last = match.near_start, match.near_start + match.near_span - 1
    if last < low or first >= high:
        return
    if low <= first and last < high:
        yield match
        return
    step, inner = match.near_strides[0], match.narrow(0, 0, 1).near_span - 1
    touched = (max(0, -((first + inner - low) // step)), min(match.extents[0] - 1, (high - 1 - first) // step))
    whole = (max(0, -((first - low) // step)), min(match.extents[0] - 1, (high - 1 - inner - first) // step))
    for index in range(touched[0], min(whole[0], touched[1] + 1)):
        yield from cut(match.narrow(0, index, 1).simplified(), low, high)
    if whole[0] <= whole[1]:
        yield match.narrow(0, whole[0], whole[1] - whole[0] + 1).simplified()
    for index in range(max(whole[1] + 1, whole[0]), touched[1] + 1):
        yield from cut(match.narrow(0, index, 1).simplified(), low, high)


def far_pieces(match: Match, limit: int) -> Iterator[Match]:
    """The match in parts of which each spans at most ``limit`` elements on the far side."""
    if match.far_span <= limit:
        yield match
        return
    loop = max(range(len(match.extents)), key=lambda index: (match.extents[index] - 1) * match.far_strides[index])
    half = match.extents[loop] // 2
    yield from far_pieces(match.narrow(loop, 0, half).simplified(), limit)
    yield from far_pieces(match.narrow(loop, half, match.extents[loop] - half).simplified(), limit)
