"""AdamW over lean states. See [Note: lean format] in native/cpp/lean_impl.hpp, and docs/lean.md.

[Note: which groups are lean]
Those that compute in bf16. Groups that are kept in fp32 (norms with running statistics, ``Plan(keep_fp32=...)``) have exact
states beside them; where nothing computes in bf16 the optimizer is refused. A group is lean as long as the last optimizer that
was built for it keeps lean states: its master has 24 bits then, whoever else reads it.
"""

from collections.abc import Iterable, Sequence

import torch

from unwall.native.lean import BLOCK, LeanArrays, lean_adamw
from unwall.native.pool import AdamWStep
from unwall.native.ticket import NativeTicket
from unwall.optim.adamw_rule import AdamWRule, adamw
from unwall.optim.lean_format import lean_update
from unwall.optim.rule import Span
from unwall.shards.group import Group
from unwall.shards.states import LEAN_MOMENTS, StateSpec, adamw_specs
from unwall.tiers.host import DTYPES
from unwall.tiers.workers import shared_pool


class LeanRule(AdamWRule):
    """AdamW over lean states, and over exact ones in groups that are not bf16."""

    def specs(self, group: Group) -> tuple[StateSpec, ...]:
        return adamw_specs(group.layout.dtype, lean=True)

    def on_device(self, spans: Sequence[Span], scale: float, factor: torch.Tensor | None) -> list[NativeTicket]:
        tickets = [_update(span, scale, factor) for span in spans]
        return [ticket for ticket in tickets if ticket is not None]

    def on_host(
        self, spans: Sequence[Span], scale: float, out: Sequence[Span] | None = None, after: Sequence[NativeTicket] = ()
    ) -> list[NativeTicket]:
        targets = [None] * len(spans) if out is None else out
        tickets = [_update(span, scale, None, target, after) for span, target in zip(spans, targets, strict=True)]
        return [ticket for ticket in tickets if ticket is not None]


def _update(
    span: Span, scale: float, factor: torch.Tensor | None, out: Span | None = None, after: Sequence[NativeTicket] = ()
) -> NativeTicket | None:
    assert isinstance(span.numbers, AdamWStep)
    step = span.numbers.scaled(scale)
    if LEAN_MOMENTS.name not in span.states:
        return adamw(span, step, factor, out=out, after=after)
    if span.param.device.type == "cpu":
        arrays = _arrays(span)
        return lean_adamw(
            shared_pool(),
            arrays,
            span.grad.data_ptr(),
            span.numel,
            step,
            grad_dtype=DTYPES[span.grad.dtype],
            out=None if out is None else _arrays(out),
            after=after,
            keep=(span, out),
        )
    assert span.remainder is not None
    lean_update(span.param, span.remainder, _whole_blocks(span.states[LEAN_MOMENTS.name]), span.grad, step, factor)
    return None


def _arrays(span: Span) -> LeanArrays:
    assert span.remainder is not None
    moments = span.states[LEAN_MOMENTS.name]
    return LeanArrays(span.param.data_ptr(), span.remainder.data_ptr(), moments.data_ptr())


def _whole_blocks(moments: torch.Tensor) -> torch.Tensor:
    """With what is behind it in its last block: padding, which belongs to nobody else."""
    return moments.as_strided((-(-moments.numel() // BLOCK) * BLOCK,), (1,))


def wants_lean(states: str | None, planned: bool, speculate: object) -> bool:
    """Whether an optimizer keeps lean states. ``states``: what it was asked for, None where the plan decides (``planned``)."""
    if states not in (None, "exact", "lean"):
        raise ValueError(f"states is 'exact' or 'lean', got {states!r}")
    if planned and states == "exact":
        raise ValueError(
            "states='exact' for a model with Plan(states='lean'), which says what fits: write Plan(states='exact'), or leave "
            "states out here"
        )
    lean = planned or states == "lean"
    if lean and speculate == "journal":
        raise ValueError(
            f"speculate={speculate!r} with lean states: what rounding at random has lost cannot be computed back. Write "
            "speculate=True, or states='exact'"
        )
    return lean


def check_lean(groups: Iterable[Group]) -> None:
    """ValueError where these groups cannot have lean states. See [Note: which groups are lean]."""
    found = list(groups)
    other = next((group for group in found if group.layout.dtype not in (torch.bfloat16, torch.float32)), None)
    if other is not None:
        raise ValueError(
            f"states='lean' is for parameters that compute in bf16, but group {other.name} computes in {other.layout.dtype}: "
            "write Plan(compute_dtype=torch.bfloat16), or states='exact'"
        )
    if found and all(group.layout.dtype is torch.float32 for group in found):
        raise ValueError(
            "states='lean' is for parameters that compute in bf16, but all of these compute in torch.float32: write "
            "Plan(compute_dtype=torch.bfloat16), or states='exact'"
        )
