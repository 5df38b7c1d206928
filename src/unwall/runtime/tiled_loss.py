"""The loss of a language model whose head is there in tiles.

[Note: tiles of a vocabulary]
``unwall.nn.linear_cross_entropy`` holds the logits of a few tokens at a time. Of a head in tiles that would read every tile
once for each chunk of tokens, and add up as many parts of its gradient in the dtype of the flat gradient. So the order is
turned round: a tile is read once, and all chunks of tokens use it. The logarithm of the sum of exponentials goes from tile to
tile. The gradients of a tile, of the tokens and of the bias are sums in fp32, as they are for a whole head: of products
that are rounded to the dtype of the tokens where it is narrower.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from unwall.nn.linear_cross_entropy import Options
from unwall.runtime.places import Place
from unwall.runtime.tiled_product import Sum
from unwall.runtime.tiling import Tile, Tiling


@dataclass
class TiledLoss:
    """What to compute: the loss of each token. ``dtype``: what autocast computes in."""

    tiling: Tiling
    param: nn.Parameter
    labels: torch.Tensor
    options: Options
    dtype: torch.dtype | None = None
    uses: dict[Place, int] = field(default_factory=dict)

    @property
    def tiles(self) -> list[Tile]:
        return self.tiling.tiles_of(self.param)

    @property
    def width(self) -> int:
        return int(self.param.shape[-1])

    def fits(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows of the head in the dtype they are multiplied in."""
        return rows if self.dtype is None else rows.to(self.dtype)

    def chunks(self, tokens: int) -> Iterator[slice]:
        for start in range(0, tokens, self.options.chunk_tokens):
            yield slice(start, min(tokens, start + self.options.chunk_tokens))


def losses(job: TiledLoss, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """One for each of the tokens ``x`` [tokens, hidden]."""
    if job.dtype is not None:
        x, bias = x.to(job.dtype), None if bias is None else bias.to(job.dtype)
    _check_labels(job)
    job.uses = job.tiling.expect(job.param, job.tiles)
    with torch.autocast(x.device.type, enabled=False):
        found: torch.Tensor = _TiledLoss.apply(x, job.param, bias, job)
    return found


def _check_labels(job: TiledLoss) -> None:
    rows, labels = int(job.param.shape[0]), job.labels
    inside = (((labels >= 0) & (labels < rows)) | (labels == job.options.ignore_index)).all()
    if labels.is_cuda:
        torch._assert_async(inside)
    elif not bool(inside):
        raise IndexError(f"label out of range: a head of {rows} rows was given labels outside of them")


class _Scores:
    """The logits of some tokens in one tile."""

    def __init__(self, job: TiledLoss, tile: Tile, rows: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.rows = job.fits(rows)
        self._bias = None if bias is None else bias[tile.start : tile.stop]
        self._tile = tile

    def of(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.rows, self._bias).float()

    def labels(self, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Columns of the targets, and which of them are in this tile."""
        start, stop = self._tile.start, self._tile.stop
        here = (targets >= start) & (targets < stop)
        return (targets - start).clamp(0, stop - start - 1)[:, None], here[:, None]


class _TiledLoss(torch.autograd.Function):
    """See [Note: tiles of a vocabulary], and [Note: tiled operators] in runtime/tiling.py."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, param: nn.Parameter, bias: torch.Tensor | None, job: TiledLoss) -> torch.Tensor:
        options = job.options
        counted = job.labels != options.ignore_index
        targets = job.labels.masked_fill(~counted, 0)
        sums = x.new_full((x.shape[0],), -torch.inf, dtype=torch.float32)
        chosen, totals = torch.zeros_like(sums), torch.zeros_like(sums)
        for tile in job.tiles:

            def work(rows: torch.Tensor, tile: Tile = tile) -> None:
                scores = _Scores(job, tile, rows, bias)
                for part in job.chunks(x.shape[0]):
                    logits = scores.of(x[part])
                    sums[part] = torch.logaddexp(sums[part], torch.logsumexp(logits, dim=-1))
                    columns, here = scores.labels(targets[part])
                    chosen[part] += torch.where(here, logits.gather(1, columns), 0.0)[:, 0]
                    if options.label_smoothing:
                        totals[part] += logits.sum(dim=-1)

            job.tiling.read(tile, job.width, work)
        found = sums - (1 - options.label_smoothing) * chosen
        if options.label_smoothing:
            found -= options.label_smoothing * (totals / param.shape[0])
        if options.z_loss:
            found += options.z_loss * sums.square()
        ctx.job = job
        ctx.save_for_backward(x, bias, targets, counted, sums)
        return torch.where(counted, found, 0.0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        job: TiledLoss = ctx.job
        try:
            wants_x, _, wants_bias, _ = ctx.needs_input_grad
            wants_rows = job.param.requires_grad and job.tiling.wants_gradient(ctx, job.param)
            found = _Gradients(job, ctx.saved_tensors, grad, wants_x, wants_bias)
            with torch.autocast(grad.device.type, enabled=False):
                for tile in reversed(job.tiles):  # those read last in forward are likely to be here still
                    found.of_tile(tile, wants_rows)
        except BaseException as error:
            job.tiling.failed(error)
            raise
        return found.x, None, found.bias, None


class _Gradients:
    """Sums over tiles and chunks, in fp32."""

    def __init__(self, job: TiledLoss, saved: tuple[Any, ...], grad: torch.Tensor, wants_x: bool, wants_bias: bool) -> None:
        self._job = job
        self._x, self._bias, self._targets, counted, self._sums = saved
        self._grad = torch.where(counted, grad, 0.0)
        self._of_x = Sum(self._x, self._x.shape, len(job.tiles), beside=False) if wants_x else None
        self._of_bias = torch.zeros_like(self._bias, dtype=torch.float32) if wants_bias else None

    @property
    def x(self) -> torch.Tensor | None:
        return None if self._of_x is None else self._of_x.result()

    @property
    def bias(self) -> torch.Tensor | None:
        return None if self._of_bias is None else self._of_bias.to(self._bias.dtype)

    def of_tile(self, tile: Tile, wants_rows: bool) -> None:
        """Adds what a tile gives, and hands on the tile's own gradient."""
        job, found = self._job, list[torch.Tensor]()
        job.tiling.read(tile, job.width, lambda rows: found.extend(self._through(tile, rows, wants_rows)))
        if wants_rows:

            def write(target: torch.Tensor, fresh: bool) -> None:
                target.copy_(found[0]) if fresh else target.add_(found[0])

            job.tiling.take(job.param, tile, job.uses.get(tile.place, 0), write)

    def _through(self, tile: Tile, rows: torch.Tensor, wants_rows: bool) -> list[torch.Tensor]:
        """The tile's gradient, if it is wanted."""
        job, x = self._job, self._x
        scores = _Scores(job, tile, rows, self._bias)
        many = x.shape[0] > job.options.chunk_tokens
        total = torch.zeros_like(scores.rows, dtype=torch.float32 if many else x.dtype) if wants_rows else None
        for part in job.chunks(x.shape[0]):
            slopes = self._slopes(scores, part)
            if self._of_bias is not None:
                self._of_bias[tile.start : tile.stop] += slopes.sum(0)
            narrow = slopes.to(x.dtype)
            if self._of_x is not None:
                self._of_x.add(part, slice(None), narrow, scores.rows)
            if total is not None:
                total += narrow.T @ x[part]
        return [] if total is None else [total.to(x.dtype)]

    def _slopes(self, scores: _Scores, part: slice) -> torch.Tensor:
        """The gradient of some tokens' logits, in their place."""
        options, lse = self._job.options, self._sums[part, None]
        logits = scores.of(self._x[part])
        logits.sub_(lse).exp_()
        if options.z_loss:
            logits.mul_(1 + 2 * options.z_loss * lse)
        if options.label_smoothing:
            logits.sub_(options.label_smoothing / int(self._job.param.shape[0]))
        columns, here = scores.labels(self._targets[part])
        logits.scatter_add_(1, columns, here.to(logits.dtype).mul_(options.label_smoothing - 1))
        return logits.mul_(self._grad[part, None])
