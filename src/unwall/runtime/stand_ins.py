"""Tensors that stand for a view of a flat buffer.

[Note: stand-ins]
A checkpoint keeps what it recomputed until backward has used it: all of a block at once, views of parameters among them. Those
would hold the memory of groups that are dropped meanwhile. So a checkpoint is given a stand-in, which has the shape, dtype and
device of the view and one element of memory. When backward gets it back, the group is made resident and the view made again.
"""

from typing import NamedTuple

import torch

from unwall.shards.local import distributed_like, local


class View(NamedTuple):
    """Which part of which group's flat buffer a tensor is."""

    group: int
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int


class StandIns:
    """One stand-in for each view that was ever asked for: a parameter has few."""

    def __init__(self) -> None:
        self._stand_ins: dict[View, torch.Tensor] = {}
        self._views: dict[int, View] = {}
        """By the address of the stand-in's storage, which lives as long as this does."""

    def of(self, group: int, tensor: torch.Tensor) -> torch.Tensor:
        """The stand-in of a view of a group's flat buffer."""
        part = local(tensor)
        view = View(group, part.dtype, part.shape, part.stride(), int(part.storage_offset()))
        found = self._stand_ins.get(view)
        if found is None:
            found = torch.zeros((), dtype=view.dtype, device=part.device)
            self._stand_ins[view] = found
            self._views[found.untyped_storage()._cdata] = view
        return distributed_like(tensor, found.expand(view.shape))

    def meant_by(self, tensor: torch.Tensor) -> View | None:
        """What a stand-in stands for. None: it is none."""
        return self._views.get(local(tensor).untyped_storage()._cdata) if tensor.layout is torch.strided else None
