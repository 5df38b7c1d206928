"""Products with a matrix that is there in tiles: a linear layer, one of several stacked experts, or all of them at once."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from unwall.runtime.places import Place
from unwall.runtime.tiling import Tile, Tiling


class Stretch(NamedTuple):
    """Rows of the input, and the rows of the matrix that they are multiplied with."""

    low: int
    high: int
    start: int
    stop: int


class Overlap(NamedTuple):
    """What of one stretch a tile holds."""

    inputs: slice
    """Rows of the input."""
    rows: slice
    """Rows in the tile."""
    features: slice
    """The same rows, counted from the start of the stretch."""


@dataclass
class Product:
    """What to compute: ``input @ matrix.T`` for each stretch or, ``across``, ``input @ matrix``."""

    tiling: Tiling
    param: nn.Parameter
    stretches: Sequence[Stretch]
    across: bool
    dtype: torch.dtype | None = None
    """What autocast computes in. None: the dtypes of the operands, which must agree."""
    uses: dict[Place, int] = field(default_factory=dict)

    @property
    def width(self) -> int:
        return int(self.param.shape[-1])

    @property
    def tiles(self) -> list[Tile]:
        """Those that are read, in order."""
        return [tile for tile in self.tiling.tiles_of(self.param) if any(True for _ in self.overlaps(tile))]

    def overlaps(self, tile: Tile) -> Iterator[Overlap]:
        for low, high, start, stop in self.stretches:
            first, last = max(start, tile.start), min(stop, tile.stop)
            if first < last and low < high:
                rows = slice(first - tile.start, last - tile.start)
                yield Overlap(slice(low, high), rows, slice(first - start, last - start))

    @property
    def out_features(self) -> int:
        first = self.stretches[0]
        return self.width if self.across else first.stop - first.start

    def fits(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows of the matrix in the dtype they are multiplied in."""
        return rows if self.dtype is None else rows.to(self.dtype)


def product(job: Product, inputs: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Inputs of any number of dimensions, the last one multiplied. ``bias`` only without ``across``."""
    if job.dtype is not None:
        inputs, bias = inputs.to(job.dtype), None if bias is None else bias.to(job.dtype)
    flat = inputs.reshape(-1, inputs.shape[-1])
    job.uses = job.tiling.expect(job.param, job.tiles)
    with torch.autocast(inputs.device.type, enabled=False):
        result: torch.Tensor = _TiledProduct.apply(flat, job.param, bias, job)
    return result.view(*inputs.shape[:-1], job.out_features)


class _TiledProduct(torch.autograd.Function):
    """See [Note: tiled operators] in runtime/tiling.py."""

    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor, param: nn.Parameter, bias: torch.Tensor | None, job: Product) -> torch.Tensor:
        ctx.job, ctx.biased = job, bias is not None
        ctx.rows = inputs.shape
        ctx.save_for_backward(inputs if param.requires_grad else None)
        return _across(inputs, job) if job.across else _along(inputs, bias, job)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        job: Product = ctx.job
        try:
            (inputs,) = ctx.saved_tensors
            wanted = job.param.requires_grad and job.tiling.wants_gradient(ctx, job.param)
            needed = ctx.needs_input_grad[0]
            grad_inputs = Sum(grad, ctx.rows, len(job.tiles), job.across) if needed else None
            with torch.autocast(grad.device.type, enabled=False):
                for tile in reversed(job.tiles):  # those read last in forward are likely to be here still
                    if grad_inputs is not None:
                        job.tiling.read(tile, job.width, _Backward(job, tile, grad, grad_inputs))
                    if wanted:
                        job.tiling.take(job.param, tile, job.uses.get(tile.place, 0), _Weight(job, tile, grad, inputs))
                grad_bias = grad.sum(0) if ctx.biased and ctx.needs_input_grad[2] else None
        except BaseException as error:
            job.tiling.failed(error)
            raise
        return None if grad_inputs is None else grad_inputs.result(), None, grad_bias, None


def _along(inputs: torch.Tensor, bias: torch.Tensor | None, job: Product) -> torch.Tensor:
    """Each tile gives columns of the result."""
    covered = sum(stretch.high - stretch.low for stretch in job.stretches)
    make = inputs.new_empty if covered == inputs.shape[0] else inputs.new_zeros
    out = make((inputs.shape[0], job.out_features))
    for tile in job.tiles:

        def work(rows: torch.Tensor, tile: Tile = tile) -> None:
            rows = job.fits(rows)
            for there, here, features in job.overlaps(tile):
                target = out[there, features]
                if bias is None:
                    torch.mm(inputs[there], rows[here].t(), out=target)
                else:
                    torch.addmm(bias[features], inputs[there], rows[here].t(), out=target)

        job.tiling.read(tile, job.width, work)
    return out


def _across(inputs: torch.Tensor, job: Product) -> torch.Tensor:
    """Each tile gives a summand of the result."""
    out = Sum(inputs, torch.Size((inputs.shape[0], job.width)), len(job.tiles), False)
    for tile in job.tiles:

        def work(rows: torch.Tensor, tile: Tile = tile) -> None:
            rows = job.fits(rows)
            for there, here, features in job.overlaps(tile):
                out.add(there, slice(None), inputs[there, features], rows[here])

        job.tiling.read(tile, job.width, work)
    return out.result()


class _Backward:
    """A tile's part of the gradient of the inputs."""

    def __init__(self, job: Product, tile: Tile, grad: torch.Tensor, target: "Sum") -> None:
        self._job, self._tile, self._grad, self._target = job, tile, grad, target

    def __call__(self, rows: torch.Tensor) -> None:
        rows = self._job.fits(rows)
        for there, here, features in self._job.overlaps(self._tile):
            if self._job.across:
                self._target.add(there, features, self._grad[there], rows[here].t())
            else:
                self._target.add(there, slice(None), self._grad[there, features], rows[here])


class _Weight:
    """A tile's gradient."""

    def __init__(self, job: Product, tile: Tile, grad: torch.Tensor, inputs: torch.Tensor) -> None:
        self._job, self._tile, self._grad, self._inputs = job, tile, grad, inputs

    def __call__(self, target: torch.Tensor, fresh: bool) -> None:
        overlaps = list(self._job.overlaps(self._tile))
        whole = len(overlaps) == 1 and overlaps[0].rows == slice(0, target.shape[0])
        if fresh and not whole:
            target.zero_()
        for there, here, features in overlaps:
            first, second = self._grad[there, features], self._inputs[there]
            if self._job.across:
                first, second = self._inputs[there, features], self._grad[there]
            _put_product(target[here], first.t(), second, add=not fresh)  # stretches have no rows in common


def _put_product(target: torch.Tensor, first: torch.Tensor, second: torch.Tensor, add: bool) -> None:
    """Autograd rounds the gradient of each use before it adds them up. So do we: ``addmm_`` would round their sum alone."""
    if not add and target.dtype == first.dtype:
        torch.mm(first, second, out=target)
        return
    found = torch.mm(first, second)
    target.add_(found) if add else target.copy_(found)


class Sum:
    """A sum of products over tiles, in fp32 where the operands are narrower and there is more than one tile.

    ``beside``: the tiles have different columns of it, so there is nothing to add up."""

    def __init__(self, like: torch.Tensor, shape: torch.Size, tiles: int, beside: bool) -> None:
        self._dtype = like.dtype
        narrow = like.dtype in (torch.bfloat16, torch.float16) and tiles > 1 and not beside
        self._sum = torch.zeros(shape, dtype=torch.float32 if narrow else like.dtype, device=like.device)

    def add(self, rows: slice, columns: slice, first: torch.Tensor, second: torch.Tensor) -> None:
        """Adds a product to a part of it."""
        target = self._sum[rows, columns]
        if target.dtype == first.dtype:
            target.addmm_(first, second)
        elif first.is_cuda:
            target.add_(torch.mm(first, second, out_dtype=target.dtype))
        else:
            target.addmm_(first.to(target.dtype), second.to(target.dtype))

    def result(self) -> torch.Tensor:
        return self._sum.to(self._dtype)
