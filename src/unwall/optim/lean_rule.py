"""AdamW over lean states. See [Note: lean format] in native/cpp/lean_impl.hpp, and docs/lean.md.

[Note: which groups are lean]
Those that compute in bf16. Groups that are kept in fp32 (norms with running statistics, ``Plan(keep_fp32=...)``) have exact
states beside them; where nothing computes in bf16 the optimizer is refused. A group is lean as long as the last optimizer that
was built for it keeps lean states: its master has 24 bits then, whoever else reads it.

[Note: lean kernel on trial]
States on an accelerator are updated by Triton's kernel (optim/triton_lean.py) or by torch's operations, which need many more
passes over memory. Triton may be missing, or unable to compile here; and checkpoints, ranks and replays count on the same bits,
while what Triton makes of an operation is up to its version. So each form of the kernel is tried against torch's operations
before it is used. If anything fails then, one warning says so, and torch's operations are used from there on. What fails later
is raised: part of the update may be done.
"""

import importlib
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

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


class DeviceUpdate(Protocol):
    """``lean_update``, or what does the same."""

    def __call__(
        self,
        half: torch.Tensor,
        remainder: torch.Tensor,
        moments: torch.Tensor,
        grad: torch.Tensor,
        step: AdamWStep,
        factor: torch.Tensor | None = None,
    ) -> None: ...


class DeviceKernel:
    """Triton's kernel, of one process. See [Note: lean kernel on trial]."""

    def __init__(self, name: str = "unwall.optim.triton_lean") -> None:
        self._name = name
        self._failed = False
        self._agreed: dict[tuple[torch.device, torch.dtype, bool], DeviceUpdate] = {}

    def update_for(self, grad: torch.Tensor, scaled: bool) -> DeviceUpdate:
        """What updates with such gradients. ``scaled``: with a ``factor``. The first call finds out whether the kernel does."""
        if self._failed or not grad.is_cuda:
            return lean_update
        form = (grad.device, grad.dtype, scaled)
        if form not in self._agreed:
            self._attempt(lambda: self._try(*form))
        return self._agreed.get(form, lean_update)

    def _attempt(self, work: Callable[[], None]) -> None:
        try:
            work()
            return
        except ImportError as error:
            said = f"Triton is not there ({error})"
        except Exception as error:
            said = f"Triton's kernel fails here ({type(error).__name__}: {error})"
        self._failed = True
        self._agreed.clear()
        warnings.warn(f"{said}: lean states on the device are updated by torch's operations, which take longer", stacklevel=2)

    def _try(self, device: torch.device, dtype: torch.dtype, scaled: bool) -> None:
        update: DeviceUpdate = importlib.import_module(self._name).launch
        if not agrees(update, device, dtype, scaled):
            raise ValueError(f"other bits than torch's operations, with gradients in {dtype}")
        self._agreed[device, dtype, scaled] = update


KERNEL = DeviceKernel()


def agrees(update: DeviceUpdate, device: torch.device, dtype: torch.dtype, scaled: bool) -> bool:
    """Whether some steps come to the bits of torch's operations: with sizes from the smallest to the largest, zeros, what is
    not finite, and a last block that is cut. Steps are as large as parameters, so that what is rounded otherwise shows."""
    numel = 400 * BLOCK + 21
    place = torch.arange(numel, dtype=torch.float32, device=device)
    half, remainder = (place * 0.7).sin().to(torch.bfloat16), (place * 37 % 256 - 128).to(torch.int8)
    moments = torch.zeros(-(-numel // BLOCK) * BLOCK, dtype=torch.int16, device=device)
    found, expected = ([tensor.clone() for tensor in (half, remainder, moments)] for _ in range(2))
    factor = torch.full((), 0.7, dtype=torch.float32, device=device) if scaled else None
    for number in range(1, 4):
        size = torch.exp2((place // BLOCK % 20 * 13 - 150) + (place % 23))
        grad = torch.where(place % 7 < number, 0.0, (place * (0.013 * number)).cos() * size)
        if number > 1:
            grad[:3] = torch.tensor([float("inf"), float("-inf"), float("nan")], device=device)
        beta1, eps = (0.9, 1e-8) if number < 3 else (0.0, 0.0)
        step = AdamWStep(lr=0.5, beta1=beta1, eps=eps, weight_decay=0.1, grad_scale=1.3, step=number)
        for (half, remainder, moments), way in ((found, update), (expected, lean_update)):
            way(half, remainder, moments, grad.to(dtype), step, factor)
    return all(torch.equal(one.view(torch.int8), other.view(torch.int8)) for one, other in zip(found, expected, strict=True))


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
    update = KERNEL.update_for(span.grad, factor is not None)
    update(span.param, span.remainder, _whole_blocks(span.states[LEAN_MOMENTS.name]), span.grad, step, factor)
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
