"""What a state of a group is to become, and where its elements lie in a checkpoint's files."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch

from unwall.checkpoint.boxes import overlaps
from unwall.checkpoint.checksums import checked_runs
from unwall.checkpoint.manifest import Tensor
from unwall.checkpoint.spread import parts_of
from unwall.shards.group import Group


@dataclass(frozen=True)
class Goal:
    """One state of one group, and what it is to become."""

    group: Group
    tensors: Mapping[int, Tensor]
    """Of each slot that is in the checkpoint."""
    dtype: torch.dtype
    otherwise: float
    """For elements that are not."""
    put: Callable[[int, torch.Tensor], None]
    """Takes elements from a position of the owned run on: flat, in host memory, in ``dtype``."""
    place: torch.Tensor | None = None
    """The owned run itself, where that is memory of this dtype: it is read right there, without ``put``."""
    halves: tuple[torch.Tensor, torch.Tensor] | None = None
    """Both parts of a split master, where they are in host memory: fp32 is taken apart on its way there, without ``put``."""

    @property
    def exact(self) -> bool:
        """The checkpoint has it in this very dtype."""
        return all(tensor.dtype == self.dtype for tensor in self.tensors.values())


@dataclass(frozen=True)
class Source:
    """Bytes of a file, within one of its blocks, and where in the owned run they belong."""

    file: str
    offset: int
    nbytes: int
    at: int
    """The first byte, counted from the start of the owned run, in the goal's dtype."""


def sources(goal: Goal, low: int, high: int) -> Iterator[Source]:
    """Where elements ``low`` to ``high`` of the owned run come from, as far as the checkpoint has them. ``goal.exact``."""
    item = goal.dtype.itemsize
    for segment in goal.group.owned_segments():
        tensor = goal.tensors.get(segment.slot)
        first, last = max(segment.shard_start, low), min(segment.shard_start + segment.numel, high)
        if tensor is None or first >= last:
            continue
        at = first
        for part in parts_of(goal.group.params[segment.slot], segment.start + first - segment.shard_start, last - first):
            for piece in tensor.pieces:
                for run in overlaps(part, piece.part):
                    start, target = piece.offset + run.second * item, (at + run.first) * item
                    for offset, nbytes in checked_runs(start, run.numel * item):
                        yield Source(piece.file, offset, nbytes, target + offset - start)
            at += part.numel


def gaps(goal: Goal, low: int, high: int) -> Iterator[tuple[int, int]]:
    """The elements from ``low`` to ``high`` of the owned run that the checkpoint does not have, padding among them."""
    for segment in goal.group.owned_segments():
        if segment.slot in goal.tensors:
            first, last = max(segment.shard_start, low), min(segment.shard_start + segment.numel, high)
            if first < last:
                if low < first:
                    yield low, first
                low = last
    if low < high:
        yield low, high
