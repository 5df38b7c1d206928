"""One AdamW update over a span, wherever the span lives."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from unwall.native.pool import AdamWStep
from unwall.native.ticket import NativeTicket
from unwall.optim.workers import shared_pool
from unwall.tiers.host import DTYPES


@dataclass(frozen=True)
class Span:
    """Flat tensors of one run of elements that are updated together."""

    param: torch.Tensor
    """In the compute dtype. The master itself, or its upper half, or a copy of ``master``."""
    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor
    grad: torch.Tensor
    remainder: torch.Tensor | None = None
    """Split master: the lower 16 bits."""
    master: torch.Tensor | None = None
    """A separate fp32 master; ``param`` is its rounded copy."""


def adamw(
    span: Span, step: AdamWStep, scale: torch.Tensor | None = None, after: Sequence[NativeTicket] = ()
) -> NativeTicket | None:
    """Updates a span. ``scale`` (a device scalar) multiplies gradients on top of ``step.grad_scale``.

    Host memory: queued on the native workers behind ``after``, the ticket says when it is done. Device memory: queued on the
    stream.
    """
    if span.param.device.type == "cpu" and span.grad.dtype in DTYPES and span.exp_avg.dtype is torch.float32:
        return _native(span, step, after)
    if span.param.is_cuda and span.exp_avg.dtype is torch.float32:
        from unwall.optim.triton_adamw import launch

        launch(span, step, scale)
        return None
    _reference(span, step, scale)
    return None


def _native(span: Span, step: AdamWStep, after: Sequence[NativeTicket]) -> NativeTicket:
    pool = shared_pool()
    tensors = (span.param, span.exp_avg, span.exp_avg_sq, span.grad, span.remainder, span.master)
    main = span.param if span.master is None else span.master
    return pool.adamw(
        main.data_ptr(),
        span.exp_avg.data_ptr(),
        span.exp_avg_sq.data_ptr(),
        span.grad.data_ptr(),
        main.numel(),
        step,
        grad_dtype=DTYPES[span.grad.dtype],
        remainder=None if span.remainder is None else span.remainder.data_ptr(),
        copy=None if span.master is None else span.param.data_ptr(),
        copy_dtype=DTYPES[span.param.dtype],
        after=after,
        keep=tensors,
    )


def _reference(span: Span, step: AdamWStep, scale: torch.Tensor | None) -> None:
    """Dtypes that have no kernel of their own (fp64), in torch operations."""
    main = span.param if span.master is None else span.master
    grad = span.grad.to(main.dtype) * step.grad_scale
    if scale is not None:
        grad = grad * scale
    span.exp_avg.lerp_(grad, 1 - step.beta1)
    span.exp_avg_sq.mul_(step.beta2).addcmul_(grad, grad, value=1 - step.beta2)
    root = (span.exp_avg_sq / (1 - step.beta2**step.step)).sqrt_().add_(step.eps)
    main.mul_(1 - step.lr * step.weight_decay)
    main.addcdiv_(span.exp_avg, root, value=-step.lr / (1 - step.beta1**step.step))
    if span.master is not None:
        span.param.copy_(span.master)
