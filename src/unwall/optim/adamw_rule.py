"""The AdamW update of spans, wherever they live."""

from collections.abc import Sequence

import torch

from unwall.native.pool import AdamWOut, AdamWStep
from unwall.native.ticket import NativeTicket
from unwall.optim.rule import Span
from unwall.shards.group import Group
from unwall.shards.states import StateSpec, adamw_specs
from unwall.tiers.host import DTYPES
from unwall.tiers.workers import shared_pool


class AdamWRule:
    """AdamW as an ``UpdateRule``. The numbers of a run are an ``AdamWStep``."""

    def specs(self, group: Group) -> tuple[StateSpec, ...]:
        return adamw_specs(group.layout.dtype)

    def runs_ahead(self, dtype: torch.dtype) -> bool:
        return dtype in DTYPES

    def on_device(self, spans: Sequence[Span], scale: float, factor: torch.Tensor | None) -> list[NativeTicket]:
        tickets = [adamw(span, _step(span, scale), factor) for span in spans]
        return [ticket for ticket in tickets if ticket is not None]

    def on_host(
        self, spans: Sequence[Span], scale: float, out: Sequence[Span] | None = None, after: Sequence[NativeTicket] = ()
    ) -> list[NativeTicket]:
        targets = [None] * len(spans) if out is None else out
        tickets = [
            adamw(span, _step(span, scale), out=target, after=after) for span, target in zip(spans, targets, strict=True)
        ]
        return [ticket for ticket in tickets if ticket is not None]


def _step(span: Span, scale: float) -> AdamWStep:
    assert isinstance(span.numbers, AdamWStep)
    return span.numbers.scaled(scale)


def adamw(
    span: Span,
    step: AdamWStep,
    scale: torch.Tensor | None = None,
    *,
    out: Span | None = None,
    after: Sequence[NativeTicket] = (),
) -> NativeTicket | None:
    """Updates a span. ``scale`` (a device scalar) multiplies gradients on top of ``step.grad_scale``.

    Host memory: queued on the native workers behind ``after``, the ticket says when it is done. Device memory: queued on the
    stream.
    """
    dtype = span.states["exp_avg"].dtype
    if span.param.device.type == "cpu" and span.grad.dtype in DTYPES and dtype is torch.float32:
        return _native(span, step, out, after)
    if out is not None:
        raise ValueError(f"an update out of place needs host memory and a dtype with a kernel, got {span.param.dtype}")
    if span.param.is_cuda and dtype is torch.float32:
        from unwall.optim.triton_adamw import launch

        launch(span, step, scale)
        return None
    _reference(span, step, scale)
    return None


def _native(span: Span, step: AdamWStep, out: Span | None, after: Sequence[NativeTicket]) -> NativeTicket:
    main = span.param if span.master is None else span.master
    written = span if out is None else out
    return shared_pool().adamw(
        main.data_ptr(),
        span.states["exp_avg"].data_ptr(),
        span.states["exp_avg_sq"].data_ptr(),
        span.grad.data_ptr(),
        main.numel(),
        step,
        grad_dtype=DTYPES[span.grad.dtype],
        remainder=None if span.remainder is None else span.remainder.data_ptr(),
        copy=None if span.master is None else written.param.data_ptr(),
        copy_dtype=DTYPES[span.param.dtype],
        out=None if out is None else _addresses(out),
        after=after,
        keep=(span, out),
    )


def _addresses(out: Span) -> AdamWOut:
    main = out.param if out.master is None else out.master
    return AdamWOut(
        param=main.data_ptr(),
        exp_avg=out.states["exp_avg"].data_ptr(),
        exp_avg_sq=out.states["exp_avg_sq"].data_ptr(),
        remainder=None if out.remainder is None else out.remainder.data_ptr(),
    )


def _reference(span: Span, step: AdamWStep, scale: torch.Tensor | None) -> None:
    """Dtypes that have no kernel of their own (fp64), in torch operations."""
    main = span.param if span.master is None else span.master
    grad = span.grad.to(main.dtype) * step.grad_scale
    if scale is not None:
        grad = grad * scale
    exp_avg, exp_avg_sq = span.states["exp_avg"], span.states["exp_avg_sq"]
    exp_avg.lerp_(grad, 1 - step.beta1)
    exp_avg_sq.mul_(step.beta2).addcmul_(grad, grad, value=1 - step.beta2)
    root = (exp_avg_sq / (1 - step.beta2**step.step)).sqrt_().add_(step.eps)
    main.mul_(1 - step.lr * step.weight_decay)
    main.addcdiv_(exp_avg, root, value=-step.lr / (1 - step.beta1**step.step))
    if span.master is not None:
        span.param.copy_(span.master)
