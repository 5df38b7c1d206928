"""One AdamW update over a span, wherever the span lives."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from unwall.native.pool import AdamWOut, AdamWStep
from unwall.native.ticket import NativeTicket
from unwall.optim.runs import Run
from unwall.tiers.host import DTYPES
from unwall.tiers.meter import LinkMeter
from unwall.tiers.workers import shared_pool


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
    if span.param.device.type == "cpu" and span.grad.dtype in DTYPES and span.exp_avg.dtype is torch.float32:
        return _native(span, step, out, after)
    if out is not None:
        raise ValueError(f"an update out of place needs host memory and a dtype with a kernel, got {span.param.dtype}")
    if span.param.is_cuda and span.exp_avg.dtype is torch.float32:
        from unwall.optim.triton_adamw import launch

        launch(span, step, scale)
        return None
    _reference(span, step, scale)
    return None


UPDATE_BYTES = 26
"""What an update of one parameter reads and writes, in the split bf16 form: 14 and 12."""


def watch_update(meter: LinkMeter, ticket: NativeTicket, label: str, numel: int) -> None:
    """Counts an update on the host."""
    meter.add(numel * UPDATE_BYTES)
    meter.watch(ticket, label)


def finish_updates(meter: LinkMeter, label: str, work: Iterable[tuple[NativeTicket | None, Span]]) -> None:
    """Waits for updates on the host and counts them."""
    tickets = [(ticket, span.param.numel()) for ticket, span in work]
    for ticket, numel in tickets:
        if ticket is not None:
            watch_update(meter, ticket, label, numel)
            ticket.wait()


def has_kernel(dtype: torch.dtype) -> bool:
    """Whether parameters of this dtype are updated by native code on the host."""
    return dtype in DTYPES


def run_spans(tensors: dict[str, torch.Tensor], value: torch.Tensor, runs: Sequence[Run]) -> list[tuple[Span, AdamWStep]]:
    """The parts of a group's states (named as the fields of ``Span``) that each run updates, with the run's numbers."""
    found = []
    for run in runs:
        assert isinstance(run.key, AdamWStep)
        part = slice(run.start, run.end)
        found.append((Span(grad=value[part], **{name: tensor[part] for name, tensor in tensors.items()}), run.key))
    return found


def _native(span: Span, step: AdamWStep, out: Span | None, after: Sequence[NativeTicket]) -> NativeTicket:
    pool = shared_pool()
    tensors = (span.param, span.exp_avg, span.exp_avg_sq, span.grad, span.remainder, span.master)
    main = span.param if span.master is None else span.master
    written = span if out is None else out
    return pool.adamw(
        main.data_ptr(),
        span.exp_avg.data_ptr(),
        span.exp_avg_sq.data_ptr(),
        span.grad.data_ptr(),
        main.numel(),
        step,
        grad_dtype=DTYPES[span.grad.dtype],
        remainder=None if span.remainder is None else span.remainder.data_ptr(),
        copy=None if span.master is None else written.param.data_ptr(),
        copy_dtype=DTYPES[span.param.dtype],
        out=None if out is None else _addresses(out),
        after=after,
        keep=(*tensors, out),
    )


def _addresses(out: Span) -> AdamWOut:
    main = out.param if out.master is None else out.master
    remainder = None if out.remainder is None else out.remainder.data_ptr()
    return AdamWOut(
        param=main.data_ptr(), exp_avg=out.exp_avg.data_ptr(), exp_avg_sq=out.exp_avg_sq.data_ptr(), remainder=remainder
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
