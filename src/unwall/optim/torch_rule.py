"""The update of a ``torch.optim`` optimizer, over flat pieces of any size.

[Note: pieces of a step]
The inner optimizer sees no parameter of the model. For each piece of a group (a chunk from disk, a few million elements in
memory) a copy of it is given flat fp32 tensors, with views of the group's states in its ``state``, and takes one step. All
pieces of a parameter begin at the same past: what the optimizer knows beside tensors of the parameter's shape (a step count).
What that past becomes is found out once for each step, by stepping a tiny probe; so it is known before anything is updated, it
is the same on ranks that own nothing of a parameter, and a piece whose disk request failed can be taken again.
"""

import collections
import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from unwall.native.ticket import NativeTicket
from unwall.optim.python_job import PythonJob
from unwall.optim.rule import Span
from unwall.optim.wrapped_inner import CALLS, HOOKS
from unwall.shards.group import Group
from unwall.shards.master import PIECE_ELEMENTS, join, split_into
from unwall.shards.states import StateSpec, moment_dtype
from unwall.tiers.workers import shared_pool

PROBE_ELEMENTS = 3


@dataclass(frozen=True, eq=False)
class Past:
    """What an inner optimizer knows of a parameter so far. Parameters that went through the same share one."""

    scalars: Mapping[str, Any]
    """Everything but the tensors that have an element for each of the parameter's."""
    stored: frozenset[str]
    """Which of those tensors exist: an optimizer may make them in its first step, and treat that step differently."""


NO_PAST = Past({}, frozenset())


@dataclass(frozen=True, eq=False)
class InnerStep:
    """One step of an inner optimizer for parameters with the same options and past: the numbers of a run."""

    shell: torch.optim.Optimizer
    """The inner optimizer as it was before the step, without parameters."""
    options: Mapping[str, Any]
    past: Past


class InnerPiece:
    """What an inner optimizer steps on: a flat parameter, its gradient, and the states it begins with."""

    def __init__(self, step: InnerStep, values: torch.Tensor, grad: torch.Tensor, states: Mapping[str, torch.Tensor]) -> None:
        self.step = step
        self.values = values
        self.param = nn.Parameter(values, requires_grad=False)
        self.param.grad = grad
        on_device = step.options.get("fused") or step.options.get("capturable")  # as torch's own load_state_dict has it
        self.state = {
            name: value.to(values.device) if on_device and isinstance(value, torch.Tensor) else value
            for name, value in copy.deepcopy(dict(step.past.scalars)).items()
        }
        self.state.update({name: states[name] for name in step.past.stored})


def bare(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """A copy of an optimizer without parameters, states and hooks. What was put over its methods stays behind, too: a
    scheduler's ``step``, and all that is passed on to the one that wraps it."""
    made: torch.optim.Optimizer = object.__new__(type(optimizer))
    made.__dict__ = {name: value for name, value in optimizer.__dict__.items() if name not in CALLS}
    for name in HOOKS:
        made.__dict__[name] = collections.OrderedDict()
    made.param_groups = []
    made.state = collections.defaultdict(dict)
    return made


def take_step(pieces: Sequence[InnerPiece]) -> torch.optim.Optimizer:
    """One step over pieces, all of the same step of the same optimizer. Gives that optimizer back as it is afterwards."""
    shell = bare(pieces[0].step.shell)
    members: dict[InnerStep, list[nn.Parameter]] = {}
    for piece in pieces:
        members.setdefault(piece.step, []).append(piece.param)
        if piece.state:
            shell.state[piece.param] = piece.state
    shell.param_groups = [{**step.options, "params": params} for step, params in members.items()]
    with torch.no_grad():
        shell.step()
    for piece in pieces:
        piece.state = shell.state[piece.param]
        if piece.param.data_ptr() != piece.values.data_ptr():  # it was given other memory
            piece.values.copy_(piece.param)
        piece.param.grad = None
    return shell


def probe(step: InnerStep, device: torch.device, dtype: torch.dtype, states: Sequence[StateSpec]) -> InnerPiece:
    """A piece to find out what a step makes of a past."""
    values, grad = (torch.ones(PROBE_ELEMENTS, dtype=dtype, device=device) for _ in range(2))
    kept = {
        spec.name: torch.ones(PROBE_ELEMENTS, dtype=dtype if spec.dtype is torch.float32 else spec.dtype, device=device)
        for spec in states
    }
    return InnerPiece(step, values, grad, kept)


def past_of(piece: InnerPiece) -> Past:
    """What a probe has become."""
    tensors = {name for name, value in piece.state.items() if spans(value, piece.values)}
    return Past({name: value for name, value in piece.state.items() if name not in tensors}, frozenset(tensors))


def spans(value: Any, param: torch.Tensor) -> bool:
    """Whether a state has one element for each element of a parameter (a moment, not a step count)."""
    return isinstance(value, torch.Tensor) and value.shape == param.shape and value.dim() > 0


class TorchRule:
    """A ``torch.optim`` optimizer as an ``UpdateRule``. The numbers of a run are an ``InnerStep``."""

    def __init__(self) -> None:
        self.kept: dict[int, dict[str, StateSpec]] = {}
        """The states of each parameter, by its id and their names."""

    def specs(self, group: Group) -> tuple[StateSpec, ...]:
        found: dict[str, StateSpec] = {}
        for param in group.params:
            for name, spec in self.kept.get(id(param), {}).items():
                wide = moment_dtype(group.layout.dtype) if spec.dtype is torch.float32 else spec.dtype
                found.setdefault(name, StateSpec(name, wide, spec.initial))
        return tuple(found[name] for name in sorted(found))

    def runs_ahead(self, dtype: torch.dtype) -> bool:  # noqa: ARG002 (the protocol's signature)
        return False

    def on_device(self, spans: Sequence[Span], scale: float, factor: torch.Tensor | None) -> list[NativeTicket]:
        _update(spans, scale, factor)
        return []

    def on_host(
        self, spans: Sequence[Span], scale: float, out: Sequence[Span] | None = None, after: Sequence[NativeTicket] = ()
    ) -> list[NativeTicket]:
        if out is not None:
            raise ValueError("a torch optimizer updates in place only")
        # A chunk from disk (it comes after its reads) is tried again where it failed. What of it is in memory must then be as
        # it was, so the step works on copies: an optimizer that raises may have written to half of its tensors.
        return [PythonJob(lambda: _update(spans, scale, None, on_copies=bool(after)), after)]


def _update(spans: Sequence[Span], scale: float, factor: torch.Tensor | None, on_copies: bool = False) -> None:
    """``on_copies``: where the optimizer raises nothing is changed (of spans that are one batch, as chunks are)."""
    for batch in _batches(spans):
        pieces = [_piece(_copy(span) if on_copies else span, scale, factor) for span in batch]
        take_step(pieces)
        for span, piece in zip(batch, pieces, strict=True):
            if on_copies and span.remainder is None:
                (span.param if span.master is None else span.master).copy_(piece.values)
            for name, tensor in span.states.items():
                value = piece.state.get(name)
                if value is not None and value is not tensor:
                    tensor.copy_(value)
            if span.remainder is not None:
                split_into(span.param, span.remainder, piece.values, shared_pool())
            elif span.master is not None:
                span.param.copy_(span.master)


def _copy(span: Span) -> Span:
    """The same without the memory that an inner optimizer would write to. A split master is joined into a copy anyway."""
    states = {name: tensor.clone() for name, tensor in span.states.items()}
    if span.remainder is not None:
        return Span(span.param, span.grad, states, span.numbers, span.remainder)
    if span.master is not None:
        return Span(span.param, span.grad, states, span.numbers, master=span.master.clone())
    return Span(span.param.clone(), span.grad, states, span.numbers)


def _piece(span: Span, scale: float, factor: torch.Tensor | None) -> InnerPiece:
    assert isinstance(span.numbers, InnerStep)
    values = span.param if span.master is None else span.master
    if span.remainder is not None:
        values = join(span.param, span.remainder, shared_pool())
    grad = span.grad.to(values.dtype, copy=True)  # an optimizer may write to it
    if scale != 1.0:
        grad.mul_(scale)
    if factor is not None:
        grad.mul_(factor.to(grad))
    return InnerPiece(span.numbers, values, grad, span.states)


def _batches(spans: Sequence[Span]) -> Iterator[list[Span]]:
    """Spans for one step each: few enough elements that what the step makes of them takes little memory."""
    batch: list[Span] = []
    room = PIECE_ELEMENTS
    for span in spans:
        start = 0
        while start < span.numel:
            end = min(span.numel, start + room)
            batch.append(span if (start, end) == (0, span.numel) else _cut(span, slice(start, end)))
            room -= end - start
            start = end
            if not room:
                yield batch
                batch, room = [], PIECE_ELEMENTS
    if batch:
        yield batch


def _cut(span: Span, part: slice) -> Span:
    return Span(
        span.param[part],
        span.grad[part],
        {name: tensor[part] for name, tensor in span.states.items()},
        span.numbers,
        None if span.remainder is None else span.remainder[part],
        None if span.master is None else span.master[part],
    )
