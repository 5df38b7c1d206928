"""Gradients over replicas: the ranks of a mesh that hold the same shards once more and see other data.

[Note: replicas]
Inside a replica gradients are reduced as ever, in whatever order its ranks agree on. Replicas agree on nothing, so what they
exchange must not depend on that order: when gradients are about to be used (``step``, clipping, a look at them), each rank
averages what it has landed with the same shard's ranks in the other replicas, group by group in the order of the model, added
in rank order. An average of averages changes nothing, so it does not matter how often that is done, nor whether a backward has
added to some of them since. Updates ahead of the step would use gradients before that and do not take place.

Where gradients travel packed inside a replica (``Plan.reduce_dtype``), they do so between replicas (shards/packed_average.py).
Packing adds noise, so what no replica has changed since it was averaged stays as it is. And what was only changed by hand since
(clipped by torch's function, parameter by parameter) travels as it is: beside elements that are not clipped yet the noise, or
what feedback has kept of the sum before, would be larger than those that are.
"""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, NamedTuple

import torch

from unwall.plans import Plan
from unwall.shards.collectives import Ranks
from unwall.shards.compress import Codec, seed_of, travels_packed
from unwall.shards.gradient import Gradient
from unwall.shards.packed_average import PackedAverage
from unwall.tiers.block import MemoryBlock
from unwall.tiers.ledger import BudgetError
from unwall.tiers.tiers import Tiers
from unwall.tiers.workers import shared_pool

if TYPE_CHECKING:
    from unwall.runtime.engine import Engine

PIECE_ELEMENTS = 1 << 24
"""Averaged at a time, so that the copies of all replicas take little memory."""
PACKED_PIECE_ELEMENTS = 1 << 22
"""The same for what travels packed: four bytes per element are copied first."""


class _State(NamedTuple):
    """What a gradient was like when it was averaged."""

    reductions: int
    serial: int
    present: frozenset[int]


class Replicas:
    """Averages an engine's gradients over the replicas. See [Note: replicas]."""

    def __init__(self, ranks: Ranks, plan: Plan, gradients: list[Gradient], tiers: Tiers) -> None:
        self.averaged_elements = 0
        """Since the statistics were reset."""
        self._ranks = ranks
        self._tiers = tiers
        self._averaged: list[_State] = []
        """Of each gradient what it was when it was averaged last."""
        self._packed = None if plan.reduce_bits is None else PackedAverage(ranks, Codec(plan.reduce_bits, shared_pool))
        self._feedback = plan.reduce_feedback
        self._residuals: dict[int, MemoryBlock] = {}
        """By group. See [Note: feedback] in shards/packed_reduce.py."""
        for gradient in gradients:
            if any(param.requires_grad for param in gradient.group.params):
                self._residual(gradient)  # now, when it is known whether all fits

    @property
    def averaged_bytes(self) -> int:
        """What came from other replicas since then."""
        return self._ranks.traffic.reduced_bytes

    def reset(self) -> None:
        """Statistics start anew."""
        self.averaged_elements = 0
        self._ranks.traffic.reset()

    def average(self, engine: "Engine") -> None:
        """All ranks of all replicas call it at the same point."""
        states = self._states(engine.gradients)
        before: list[_State | None] = [*self._averaged, *[None] * (len(states) - len(self._averaged))]
        changed = [now != then for now, then in zip(states, before, strict=True)]
        reduced = [then is None or now.reductions != then.reductions for now, then in zip(states, before, strict=True)]
        every = self._ranks.every((changed, reduced, [sorted(gradient.present) for gradient in engine.gradients]))
        for index, gradient in enumerate(engine.gradients):
            present = {slot for _, _, held in every for slot in held[index]}
            if present and any(theirs[index] for theirs, _, _ in every):
                self._average(engine, gradient, present, exactly=not any(theirs[index] for _, theirs, _ in every))
        self._averaged = self._states(engine.gradients)

    def _average(self, engine: "Engine", gradient: Gradient, present: set[int], exactly: bool) -> None:
        if not present <= gradient.present or not gradient.held:
            engine.executor.make_room(0 if gradient.held else gradient.flat_bytes, f"gradients of {gradient.group.name}")
            gradient.hold(present)
        run = gradient.change()
        self.averaged_elements += run.numel()
        if self._packed is not None and self._travels_packed(gradient) and not exactly:
            self._average_packed(engine, gradient, present, run, self._packed)
            return
        for start in range(0, run.numel(), PIECE_ELEMENTS):
            piece = run[start : start + PIECE_ELEMENTS]
            dtype = torch.promote_types(piece.dtype, torch.float32)
            with self._meanwhile(engine, piece.numel() * dtype.itemsize * (self._ranks.size + 2), gradient):
                wide = piece.to(self._ranks.device, dtype)
                piece.copy_(self._ranks.all_reduce_sum(wide).div_(self._ranks.size))
            self._ranks.traffic.reduced_bytes += (self._ranks.size - 1) * wide.nbytes

    def _average_packed(
        self, engine: "Engine", gradient: Gradient, present: set[int], run: torch.Tensor, packed: PackedAverage
    ) -> None:
        residual = self._residual(gradient)
        aside = [] if residual is None else _set_aside(gradient, residual, present)
        for start in range(0, run.numel(), PACKED_PIECE_ELEMENTS):
            piece = run[start : start + PACKED_PIECE_ELEMENTS]
            # By the place in the group, not by the data-parallel rank: at stage 0 all of them average the same elements.
            first = gradient.group.own_start + start
            seed = seed_of(engine.ranks.steps, gradient.passes, gradient.group.index, self._ranks.rank, first)
            rest = None if residual is None else residual[start : start + PACKED_PIECE_ELEMENTS]
            nbytes = packed.nbytes(piece.numel(), piece.dtype, rest is not None)
            with self._meanwhile(engine, nbytes, gradient):
                wide = None if rest is None else rest.to(self._ranks.device, torch.float32)
                piece.copy_(packed.average(piece.to(self._ranks.device), seed, wide))
                if rest is not None and wide is not None:
                    rest.copy_(wide)
        for place, values in aside:
            place.copy_(values)

    @contextmanager
    def _meanwhile(self, engine: "Engine", nbytes: int, gradient: Gradient) -> Iterator[None]:
        """What an average takes on the device is on the ledger. Cached groups make room for it, as far as there are any: the
        same pieces on each rank, however much room one of them has."""
        label = f"the average of {gradient.group.name} over replicas"
        with suppress(BudgetError):
            engine.executor.make_room(nbytes, label)
        with self._tiers.device.noting(nbytes, label):
            yield

    def _travels_packed(self, gradient: Gradient) -> bool:
        """As inside a replica: what is summed in fp32 was meant to be exact."""
        return self._packed is not None and travels_packed(gradient.reducer.dtype)

    def _residual(self, gradient: Gradient) -> torch.Tensor | None:
        """What rounding left of this rank's shard, in host memory: it is needed once per step."""
        if not self._feedback or not self._travels_packed(gradient):
            return None
        group, dtype = gradient.group, gradient.reducer.dtype
        if group.index not in self._residuals:
            label = f"what rounding left of the average of {group.name}"
            self._residuals[group.index] = self._tiers.memory("host", group.own_numel, dtype, label)
        return self._residuals[group.index].view(dtype)

    def _states(self, gradients: list[Gradient]) -> list[_State]:
        return [_State(each.reductions, each.serial, frozenset(each.present)) for each in gradients]


def _set_aside(gradient: Gradient, residual: torch.Tensor, present: set[int]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The residuals of parameters without a gradient are zeros meanwhile."""
    found = []
    for segment in gradient.group.owned_segments():
        if segment.slot not in present:
            place = residual.narrow(0, segment.shard_start, segment.numel)
            found.append((place, place.clone()))
            place.zero_()
    return found
