"""Rows of a matrix that is there in tiles."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from unwall.runtime.places import Place
from unwall.runtime.tiling import Tile, Tiling


@dataclass
class Lookup:
    """What to compute. ``padding``: the row that gets no gradient, or -1."""

    tiling: Tiling
    param: nn.Parameter
    padding: int = -1
    by_frequency: bool = False
    uses: dict[Place, int] = field(default_factory=dict)

    @property
    def tiles(self) -> list[Tile]:
        return self.tiling.tiles_of(self.param)


def lookup(job: Lookup, ids: torch.Tensor) -> torch.Tensor:
    """One row for each id."""
    inside = ((ids >= 0) & (ids < job.param.shape[0])).all()
    if ids.is_cuda:
        torch._assert_async(inside)
    elif not bool(inside):
        raise IndexError(f"index out of range: an embedding of {job.param.shape[0]} rows was given ids outside of them")
    job.uses = job.tiling.expect(job.param, job.tiles)
    found: torch.Tensor = _TiledLookup.apply(ids, job.param, job)
    return found


class _TiledLookup(torch.autograd.Function):
    """See [Note: tiled operators] in runtime/tiling.py."""

    @staticmethod
    def forward(ctx: Any, ids: torch.Tensor, param: nn.Parameter, job: Lookup) -> torch.Tensor:
        ctx.job = job
        ctx.save_for_backward(ids)
        with torch._C.DisableTorchFunctionSubclass():
            out = torch.zeros((*ids.shape, param.shape[1]), dtype=param.dtype, device=ids.device)
        for tile in job.tiles:

            def work(rows: torch.Tensor, tile: Tile = tile) -> None:
                here = ((ids >= tile.start) & (ids < tile.stop)).unsqueeze(-1)
                found = nn.functional.embedding((ids - tile.start).clamp(0, tile.stop - tile.start - 1), rows)
                torch.where(here, found, out, out=out)

            job.tiling.read(tile, param.shape[1], work)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        job: Lookup = ctx.job
        try:
            (ids,) = ctx.saved_tensors
            if job.tiling.wants_gradient(ctx, job.param):
                for tile in reversed(job.tiles):
                    job.tiling.take(job.param, tile, job.uses.get(tile.place, 0), _Rows(job, tile, grad, ids))
        except BaseException as error:
            job.tiling.failed(error)
            raise
        return None, None, None


class _Rows:
    """A tile's gradient."""

    def __init__(self, job: Lookup, tile: Tile, grad: torch.Tensor, ids: torch.Tensor) -> None:
        self._job, self._tile, self._grad, self._ids = job, tile, grad, ids

    def __call__(self, target: torch.Tensor, fresh: bool) -> None:
        ids, tile, count = self._ids, self._tile, target.shape[0]
        elsewhere = (ids < tile.start) | (ids >= tile.stop) | (ids == self._job.padding)
        local = (ids - tile.start).masked_fill(elsewhere, count)  # one row more, which takes what goes elsewhere
        backward = torch.ops.aten.embedding_dense_backward
        found = backward(self._grad, local, count + 1, count, self._job.by_frequency)[:count]
        target.copy_(found) if fresh else target.add_(found)
