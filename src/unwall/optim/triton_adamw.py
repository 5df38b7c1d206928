"""The AdamW update on an accelerator, one pass over memory. Imported only where there is one."""

import math
from typing import Any

import torch
import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]

from unwall.native.pool import AdamWStep
from unwall.optim.rule import Span

_BLOCK = 1024


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _adamw(  # type: ignore[no-untyped-def]
    param, remainder, master, exp_avg, exp_avg_sq, grad, scale, n,
    beta1, beta2, weight1, weight2, eps, decay, step_size, root2, grad_scale,
    SPLIT: tl.constexpr, COPY: tl.constexpr, SCALED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    g = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32) * grad_scale
    if SCALED:
        g = g * tl.load(scale)
    if SPLIT:
        half = tl.load(param + at, mask=inside, other=0.0).to(tl.int16, bitcast=True).to(tl.int32)
        low = tl.load(remainder + at, mask=inside, other=0).to(tl.int32)
        p = ((half << 16) + low).to(tl.float32, bitcast=True)
    elif COPY:
        p = tl.load(master + at, mask=inside, other=0.0)
    else:
        p = tl.load(param + at, mask=inside, other=0.0)
    m = tl.load(exp_avg + at, mask=inside, other=0.0)
    v = tl.load(exp_avg_sq + at, mask=inside, other=0.0)
    m = beta1 * m + weight1 * g
    v = beta2 * v + weight2 * g * g
    p = p * decay - step_size * (m / (tl.sqrt(v) * root2 + eps))
    tl.store(exp_avg + at, m, mask=inside)
    tl.store(exp_avg_sq + at, v, mask=inside)
    if SPLIT:
        bits = tl.where(p == p, p.to(tl.int32, bitcast=True), 0x7FC00000)  # a NaN's payload could carry into the sign
        high = (bits + 0x8000) >> 16
        tl.store(param + at, high.to(tl.int16).to(tl.bfloat16, bitcast=True), mask=inside)
        tl.store(remainder + at, (bits - (high << 16)).to(tl.int16), mask=inside)
    elif COPY:
        tl.store(master + at, p, mask=inside)
        tl.store(param + at, p.to(param.dtype.element_ty), mask=inside)
    else:
        tl.store(param + at, p, mask=inside)


def launch(span: Span, step: AdamWStep, scale: torch.Tensor | None) -> None:
    """Queues the update on the current stream."""
    n = span.param.numel()
    exp_avg, exp_avg_sq = span.states["exp_avg"], span.states["exp_avg_sq"]
    unused = exp_avg
    arguments: tuple[Any, ...] = (
        span.param,
        unused if span.remainder is None else span.remainder,
        unused if span.master is None else span.master,
        exp_avg,
        exp_avg_sq,
        span.grad,
        unused if scale is None else scale,
        n,
        step.beta1,
        step.beta2,
        1 - step.beta1,
        1 - step.beta2,
        step.eps,
        1 - step.lr * step.weight_decay,
        step.lr / (1 - step.beta1**step.step),
        1 / math.sqrt(1 - step.beta2**step.step),
        step.grad_scale,
    )
    _adamw[(triton.cdiv(n, _BLOCK),)](
        *arguments,
        SPLIT=span.remainder is not None,
        COPY=span.master is not None,
        SCALED=scale is not None,
        BLOCK=_BLOCK,
    )
