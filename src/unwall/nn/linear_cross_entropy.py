"""The loss of a language model without its logits.

[Note: tokens in chunks]
Logits are tokens x vocabulary, in fp32 often the largest tensor of a training step, and plain PyTorch holds three of them. Here
the matrix product and the loss run over a few tokens at a time. Forward keeps two numbers per token (the logarithm of the sum
of exponentials, and the loss); backward computes each chunk's logits again. That is one more product with the head's matrix.
"""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional
from torch.overrides import has_torch_function_unary
from torch.utils.checkpoint import checkpoint

Reduction = Literal["mean", "sum", "none"]
CHUNK_BYTES = 256 << 20
"""What the logits of a chunk take in fp32, unless ``chunk_tokens`` says otherwise."""
MIN_CHUNK_TOKENS = 256
"""Fewer would waste the matrix units."""


class Options(NamedTuple):
    """What the loss of a token depends on, and how many of them are held at a time."""

    ignore_index: int
    label_smoothing: float
    z_loss: float
    chunk_tokens: int


def linear_cross_entropy(
    x: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    chunk_tokens: int | None = None,
) -> torch.Tensor:
    """``cross_entropy(linear(x, weight, bias).float(), labels)``, holding the logits of ``chunk_tokens`` tokens at a time.

    ``x``: [..., hidden]; ``weight``: [vocabulary, hidden]; ``labels``: [...], as many as tokens. ``z_loss`` adds
    ``z_loss * logsumexp(logits) ** 2`` to each token's loss. Labels equal to ``ignore_index`` count nothing.
    """
    _check(x, weight, labels, bias, reduction, label_smoothing, z_loss, chunk_tokens)
    kind = x.device.type
    in_tiles = has_torch_function_unary(weight)
    if torch.is_autocast_enabled(kind) and not in_tiles:
        dtype = torch.get_autocast_dtype(kind)
        x, weight = x.to(dtype), weight.to(dtype)
        bias = None if bias is None else bias.to(dtype)
    if chunk_tokens is None:
        chunk_tokens = max(MIN_CHUNK_TOKENS, CHUNK_BYTES // (4 * max(1, weight.shape[0])))
    flat = labels.reshape(-1).to(x.device)
    options = Options(ignore_index, label_smoothing, z_loss, chunk_tokens)
    tokens = x.reshape(-1, x.shape[-1])
    losses: torch.Tensor
    if in_tiles:
        losses = _of_its_class(weight)(tokens, weight, bias, flat, options)
    else:
        losses = _LinearCrossEntropy.apply(tokens, weight, bias, flat, options)
    if reduction == "none":
        return losses.view(labels.shape)
    total = losses.sum()
    return total if reduction == "sum" else total / (flat != ignore_index).sum()


def _check(
    x: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    bias: torch.Tensor | None,
    reduction: str,
    label_smoothing: float,
    z_loss: float,
    chunk_tokens: int | None,
) -> None:
    if weight.dim() != 2 or x.dim() < 1 or x.shape[-1] != weight.shape[1]:
        raise ValueError(f"x [..., hidden] and weight [vocabulary, hidden]: got {tuple(x.shape)} and {tuple(weight.shape)}")
    if labels.shape != x.shape[:-1]:
        raise ValueError(f"one label per token: x has {tuple(x.shape[:-1])} tokens, labels are {tuple(labels.shape)}")
    if labels.is_floating_point():
        raise ValueError(f"labels are whole numbers, got {labels.dtype}")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"bias has one entry per row of weight ({weight.shape[0]}), got {tuple(bias.shape)}")
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"reduction is mean, sum or none, got {reduction!r}")
    if not 0.0 <= label_smoothing <= 1.0:
        raise ValueError(f"label_smoothing is between 0 and 1, got {label_smoothing}")
    if not z_loss >= 0.0:
        raise ValueError(f"z_loss is 0 or more, got {z_loss}")
    if chunk_tokens is not None and (not isinstance(chunk_tokens, int) or chunk_tokens < 1):
        raise ValueError(f"chunk_tokens is a whole number above 0, got {chunk_tokens!r}")


def _of_its_class(weight: torch.Tensor) -> Callable[..., torch.Tensor]:
    """``chunk_by_chunk``, as the weight's class computes it. Only a class that says so is asked: others know operators alone,
    and would call it with their own meaning of these switched off."""
    kind: Any = type(weight)
    if not getattr(kind, "knows_chunk_by_chunk", False):
        return chunk_by_chunk
    return lambda *args: kind.__torch_function__(chunk_by_chunk, (kind,), args)


def chunk_by_chunk(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    labels: torch.Tensor,
    options: Options,
) -> torch.Tensor:
    """The same for a weight of a class that has functions of its own: torch's own operators, recomputed in backward. One that
    is never there as a whole has this function among its own (a sharded model's: runtime/tiled_loss.py)."""
    ignore_index, smoothing, z_loss, chunk = options

    def losses(x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        logits = functional.linear(x, weight, bias).float()
        counted = labels != ignore_index
        lse = torch.logsumexp(logits, dim=-1)
        loss = lse - (1 - smoothing) * logits.gather(1, labels.masked_fill(~counted, 0)[:, None])[:, 0]
        if smoothing:
            loss = loss - smoothing * logits.mean(dim=-1)
        if z_loss:
            loss = loss + z_loss * lse.square()
        return torch.where(counted, loss, loss.new_zeros(()))

    parts = [slice(start, start + chunk) for start in range(0, x.shape[0], chunk)]
    found = [checkpoint(losses, x[part], labels[part], use_reentrant=False) for part in parts]
    return torch.cat(found) if found else x.new_zeros(0, dtype=torch.float32)


class _LinearCrossEntropy(torch.autograd.Function):
    """The loss of each token. See [Note: tokens in chunks]."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,  # [tokens, hidden]
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        labels: torch.Tensor,  # [tokens]
        options: Options,
    ) -> torch.Tensor:
        ignore_index, smoothing, z_loss, chunk = options
        counted = labels != ignore_index
        targets = labels.masked_fill(~counted, 0)
        losses = x.new_empty(x.shape[0], dtype=torch.float32)
        sums = torch.empty_like(losses)
        for start in range(0, x.shape[0], chunk):
            part = slice(start, start + chunk)
            logits = functional.linear(x[part], weight, bias).float()
            lse = torch.logsumexp(logits, dim=-1, out=sums[part])
            chosen = logits.gather(1, targets[part, None])[:, 0]
            loss = lse - (1 - smoothing) * chosen
            if smoothing:
                loss -= smoothing * logits.mean(dim=-1)
            if z_loss:
                loss += z_loss * lse.square()
            torch.where(counted[part], loss, loss.new_zeros(()), out=losses[part])
        ctx.save_for_backward(x, weight, bias, targets, counted, sums)
        ctx.options = (smoothing, z_loss, chunk)
        return losses

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight, bias, targets, counted, sums = ctx.saved_tensors
        smoothing, z_loss, chunk = ctx.options
        wants_x, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        grad = torch.where(counted, grad, grad.new_zeros(()))
        many = x.shape[0] > chunk
        grad_x = torch.empty_like(x) if wants_x else None
        grad_weight = torch.zeros_like(weight, dtype=torch.float32 if many else weight.dtype) if wants_weight else None
        grad_bias = torch.zeros(weight.shape[0], dtype=torch.float32, device=x.device) if wants_bias else None
        for start in range(0, x.shape[0], chunk):
            part = slice(start, start + chunk)
            logits = functional.linear(x[part], weight, bias).float()
            lse = sums[part, None]
            logits.sub_(lse).exp_()  # probabilities, in place of the logits
            if z_loss:
                logits.mul_(1 + 2 * z_loss * lse)
            if smoothing:
                logits.sub_(smoothing / weight.shape[0])
            logits.scatter_add_(1, targets[part, None], logits.new_full((), smoothing - 1).expand(logits.shape[0], 1))
            logits.mul_(grad[part, None])
            if grad_bias is not None:
                grad_bias += logits.sum(0)
            slope = logits.to(x.dtype)
            if grad_x is not None:
                torch.mm(slope, weight, out=grad_x[part])
            if grad_weight is not None:
                grad_weight += slope.T @ x[part]
        return (
            grad_x,
            None if grad_weight is None else grad_weight.to(weight.dtype),
            None if grad_bias is None or bias is None else grad_bias.to(bias.dtype),
            None,
            None,
        )
