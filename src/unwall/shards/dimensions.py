"""The dimensions of a mesh, as an engine sees them.

[Note: dimensions]
A model is cut over its data-parallel ranks: that is ``Ranks``, and all that stages, gathers and reductions are about. Around
them there may be others, each with a part of the model that is no business of this rank's groups: tensor ranks hold other
elements of the same parameters (or copies of them), pipeline ranks other layers, replicas the same shards once more. What is
over all of the model needs them: norms (tensor and pipeline ranks), whole tensors (tensor ranks), gradients (replicas).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from unwall.shards.collectives import Ranks


@dataclass
class Dimension:
    """One dimension of a mesh: its name, and the ranks along it through this one."""

    name: str
    ranks: Ranks


@dataclass
class Others:
    """The ranks beside the data-parallel ones. See [Note: dimensions]."""

    tensor: list[Dimension] = field(default_factory=list)
    """Hold other elements of the same parameters, or copies of them."""
    pipeline: list[Dimension] = field(default_factory=list)
    """Hold other layers."""
    replicas: Ranks | None = None
    """Hold the same shards, and see other data."""
    everyone: Ranks | None = None
    """All ranks of the mesh, where there are others than the data-parallel ones."""
    peers: Any = None
    """Who knows which of them has ended (parallel/peers.py). Only kept here."""

    @property
    def tensor_size(self) -> int:
        """How many ranks hold one data-parallel part of a layer."""
        size = 1
        for dimension in self.tensor:
            size *= dimension.ranks.size
        return size

    @property
    def replica_count(self) -> int:
        """How many ranks hold the same shard, this one included."""
        return 1 if self.replicas is None else self.replicas.size

    @property
    def is_first(self) -> bool:
        """Whether this rank answers for the tensor ranks and the replicas: it gets what is whole, and writes what all have."""
        mine = [dimension.ranks.rank for dimension in self.tensor]
        return not any(mine) and (self.replicas is None or self.replicas.rank == 0)

    @property
    def beyond(self) -> Sequence[Dimension]:
        """Over which a model's norm is summed after the data-parallel ranks."""
        return [*self.tensor, *self.pipeline]

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """The sum over everything that holds another part of the model, in a fixed order."""
        for dimension in self.beyond:
            values = dimension.ranks.all_reduce_sum(values)
        return values

    def sum_over_tensor_ranks(self, values: torch.Tensor) -> torch.Tensor:
        """The sum over the ranks that hold other elements of the same parameters."""
        for dimension in self.tensor:
            values = dimension.ranks.all_reduce_sum(values)
        return values

    def maximum(self, values: torch.Tensor) -> torch.Tensor:
        """Element by element, over everything that holds another part of the model."""
        for dimension in self.beyond:
            values = greatest(dimension.ranks, values)
        return values


def same_model(ranks: Ranks, others: Others) -> list[Ranks]:
    """The sets of ranks that hold parts or copies of the same layers. A broadcast along each, in this order, gives all of them
    what the first of them has."""
    around = [dimension.ranks for dimension in others.tensor]
    around += [] if others.replicas is None else [others.replicas]
    return [some for some in (*around, ranks) if some.size > 1]


def greatest(ranks: Ranks, values: torch.Tensor) -> torch.Tensor:
    """The greatest of the ranks' values, element by element."""
    if ranks.size == 1:
        return values
    every = torch.zeros(ranks.size, *values.shape, dtype=values.dtype, device=values.device)
    every[ranks.rank] = values
    return ranks.all_reduce_sum(every).amax(0)
