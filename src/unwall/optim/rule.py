"""What one optimizer does to the elements of a group, apart from where their states live.

[Note: rules]
A rule names its states (``specs``) and updates spans of elements. Everything else knows specifications, not names: states come
into being, move, are read and written chunk by chunk, saved and loaded in the same way for every rule. A rule sees flat tensors
of some run of elements, and may be given any cut of them, so its arithmetic has to be element-wise.
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from unwall.native.ticket import NativeTicket
from unwall.optim.runs import Run
from unwall.shards.group import Group
from unwall.shards.states import GRAD, GROUP, MASTER, PARAM, REMAINDER, StateKey, StateSpec
from unwall.tiers.meter import LinkMeter


@dataclass(frozen=True)
class Span:
    """Flat tensors of one run of elements that are updated with the same numbers."""

    param: torch.Tensor
    """In the compute dtype. The master itself, or its upper half, or a copy of ``master``."""
    grad: torch.Tensor
    states: Mapping[str, torch.Tensor]
    """The rule's own, by their names."""
    numbers: Hashable
    """What the rule needs to know beside tensors (learning rate, step ...): the key of the run."""
    remainder: torch.Tensor | None = None
    """Split master: the lower 16 bits."""
    master: torch.Tensor | None = None
    """A separate fp32 master; ``param`` is its rounded copy."""

    @staticmethod
    def of(tensors: Mapping[StateKey, torch.Tensor], numbers: Hashable) -> "Span":
        """From what an update reads and writes: one tensor for each key, all of the same elements."""
        return Span(
            tensors[PARAM],
            tensors[GRAD],
            {key.name: tensor for key, tensor in tensors.items() if key.owner != GROUP},
            numbers,
            tensors.get(REMAINDER.key()),
            tensors.get(MASTER.key()),
        )

    @property
    def numel(self) -> int:
        return self.param.numel()

    @property
    def traffic_bytes(self) -> int:
        """What its update reads and writes; ``update_bytes`` of shards/states.py for each element."""
        kept = [self.param, *self.states.values(), *(part for part in (self.remainder, self.master) if part is not None)]
        once = self.grad.itemsize - (0 if self.master is None else self.param.itemsize)
        return self.numel * (once + 2 * sum(tensor.itemsize for tensor in kept))


class UpdateRule(Protocol):
    """See [Note: rules]."""

    def specs(self, group: Group) -> tuple[StateSpec, ...]:
        """The states that it keeps of a group, beside parameters and master."""
        ...

    def runs_ahead(self, dtype: torch.dtype) -> bool:
        """Whether groups of this compute dtype can be updated out of place on the host."""
        ...

    def on_device(self, spans: Sequence[Span], scale: float, factor: torch.Tensor | None) -> Sequence[NativeTicket]:
        """Updates spans in place on the device, in the order of its stream. Gradients are multiplied by ``scale`` and, where
        it is given, by ``factor``, a scalar on the device. Tickets: where the device is memory that native workers update."""
        ...

    def on_host(
        self, spans: Sequence[Span], scale: float, out: Sequence[Span] | None = None, after: Sequence[NativeTicket] = ()
    ) -> Sequence[NativeTicket]:
        """Updates spans in host memory once ``after`` has ended, in place or into ``out`` (which has the same gradients). The
        tickets say when it is done; none at all: it is done already."""
        ...


def spans_of(tensors: Mapping[StateKey, torch.Tensor], grad: torch.Tensor, runs: Sequence[Run]) -> list[Span]:
    """The parts of a group's states that each run updates."""
    found = []
    for run in runs:
        parts = {key: tensor[run.start : run.end] for key, tensor in {**tensors, GRAD: grad}.items()}
        found.append(Span.of(parts, run.key))
    return found


def watch_updates(meter: LinkMeter, label: str, spans: Sequence[Span], tickets: Sequence[NativeTicket]) -> None:
    """Counts an update on the host."""
    if tickets:
        meter.add(sum(span.traffic_bytes for span in spans))
    for ticket in tickets:
        meter.watch(ticket, label)


def finish_updates(meter: LinkMeter, label: str, spans: Sequence[Span], tickets: Sequence[NativeTicket]) -> None:
    """Waits for an update on the host and counts it."""
    watch_updates(meter, label, spans, tickets)
    for ticket in tickets:
        ticket.wait()
