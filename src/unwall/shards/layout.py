"""Where each parameter lies in a group's flat buffer, and which part of it each rank owns. Pure arithmetic."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from unwall.tiers.sizes import ALIGNMENT, align_up

SLOT_BYTES = 128
"""A parameter starts at a multiple of this, so that vector loads and matrix kernels find it aligned."""


@dataclass(frozen=True)
class Slot:
    """One parameter's place in the flat buffer."""

    name: str
    shape: torch.Size
    offset: int
    """In elements."""

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def end(self) -> int:
        return self.offset + self.numel


@dataclass(frozen=True)
class Segment:
    """The part of a parameter that lies in one rank's shard. All in elements."""

    slot: int
    """Index of the parameter in its group."""
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
                found.append(Segment(index, start - slot.offset, start - low, end - start))
        return tuple(found)


def build_layout(names: Sequence[str], shapes: Sequence[torch.Size], dtype: torch.dtype, world_size: int) -> Layout:
    """Lays parameters end to end in the given order."""
    step = max(1, SLOT_BYTES // dtype.itemsize)
    slots, offset = [], 0
    for name, shape in zip(names, shapes, strict=True):
        slots.append(Slot(name, torch.Size(shape), offset))
        offset = align_up(offset + math.prod(shape), step)
    # A shard is a multiple of ALIGNMENT bytes in every representation, the 2-byte ones included.
    unit = ALIGNMENT // 2 * world_size
    return Layout(tuple(slots), dtype, world_size, max(unit, align_up(offset, unit)))
