"""Where each parameter lies in a group's flat buffer, and which part of it each rank owns. Pure arithmetic."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from unwall.tiers.sizes import ALIGNMENT, align_up

SLOT_BYTES = 128
"""A parameter starts at a multiple of this, so that vector loads and matrix kernels find it aligned."""


@dataclass(frozen=True)
class Slot:
    """A range of one parameter, most often all of it, and its place in the flat buffer. All in elements.

    Where a parameter is spread over several ranks by tensor parallelism, "the parameter" is this rank's local part of it.
    """

    name: str
    shape: torch.Size
    """Of the whole parameter."""
    offset: int
    """In the flat buffer."""
    start: int = 0
    """First element of the range, counted in the flattened parameter."""
    length: int | None = None
    """Elements of the range. None: all."""

    @cached_property
    def numel(self) -> int:
        return math.prod(self.shape) if self.length is None else self.length

    @cached_property
    def end(self) -> int:
        return self.offset + self.numel

    @cached_property
    def whole(self) -> bool:
        """Whether all of the parameter is here. Otherwise the parameter lies in several slots, of one group or of several."""
        return self.numel == math.prod(self.shape)

    @property
    def view_shape(self) -> torch.Size:
        """What the range looks like: the parameter, some of its rows, or a run of elements."""
        if self.whole:
            return self.shape
        row = math.prod(self.shape[1:])
        if row and self.start % row == 0 and self.numel % row == 0:
            return torch.Size((self.numel // row, *self.shape[1:]))
        return torch.Size((self.numel,))

    def range_of(self, flat: torch.Tensor) -> torch.Tensor:
        """The slot's part of a flattened parameter (or of a gradient, or a state of it)."""
        return flat[self.start : self.start + self.numel]


@dataclass(frozen=True)
class Segment:
    """The part of a parameter that lies in one rank's shard. All in elements."""

    slot: int
    """Index of the slot in its group."""
    start: int
    """First element, counted in the flattened parameter."""
    shard_start: int
    """First element, counted in the shard."""
    numel: int


@dataclass(frozen=True)
class Layout:
    """A group's flat buffer: slots end to end, padded so that every rank's shard has the same, aligned size."""

    slots: tuple[Slot, ...]
    dtype: torch.dtype
    world_size: int
    padded_numel: int

    @property
    def shard_numel(self) -> int:
        return self.padded_numel // self.world_size

    @property
    def numel(self) -> int:
        """Elements of the parameters, without padding."""
        return sum(slot.numel for slot in self.slots)

    @property
    def flat_bytes(self) -> int:
        return self.padded_numel * self.dtype.itemsize

    def segments(self, rank: int) -> tuple[Segment, ...]:
        """What of each parameter lies in ``rank``'s shard, in order of position."""
        low, high = rank * self.shard_numel, (rank + 1) * self.shard_numel
        found = []
        for index, slot in enumerate(self.slots):
            start, end = max(slot.offset, low), min(slot.end, high)
            if start < end:
                found.append(Segment(index, slot.start + start - slot.offset, start - low, end - start))
        return tuple(found)


def build_layout(
    names: Sequence[str],
    shapes: Sequence[torch.Size],
    dtype: torch.dtype,
    world_size: int,
    ranges: Sequence[range | None] | None = None,
) -> Layout:
    """Lays parameters end to end in the given order. ``ranges``: which elements of each, None for all of them."""
    step = max(1, SLOT_BYTES // dtype.itemsize)
    slots: list[Slot] = []
    offset = 0
    for name, shape, part in zip(names, shapes, ranges or [None] * len(names), strict=True):
        start, length = (0, None) if part is None else (part.start, len(part))
        slots.append(Slot(name, torch.Size(shape), offset, start, length))
        offset = align_up(slots[-1].end, step)
    # A shard is a multiple of ALIGNMENT bytes in every representation, the 2-byte ones included.
    unit = ALIGNMENT // 2 * world_size
    return Layout(tuple(slots), dtype, world_size, max(unit, align_up(offset, unit)))
