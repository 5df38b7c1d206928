"""Gradients over replicas: the ranks of a mesh that hold the same shards once more and see other data.

[Note: replicas]
Inside a replica gradients are reduced as ever, in whatever order its ranks agree on. Replicas agree on nothing, so what they
exchange must not depend on that order: when gradients are about to be used (``step``, clipping, a look at them), each rank
averages what it has landed with the same shard's ranks in the other replicas, group by group in the order of the model, added
in rank order. An average of averages changes nothing, so it does not matter how often that is done, nor whether a backward has
added to some of them since. Updates ahead of the step would use gradients before that and do not take place.
"""

from typing import TYPE_CHECKING

import torch

from unwall.shards.collectives import Ranks
from unwall.shards.gradient import Gradient

if TYPE_CHECKING:
    from unwall.runtime.engine import Engine

PIECE_ELEMENTS = 1 << 24
"""Averaged at a time, so that the copies of all replicas take little memory."""


class Replicas:
    """Averages an engine's gradients over the replicas. See [Note: replicas]."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._averaged: list[tuple[int, frozenset[int]]] = []
        """Of each gradient what it was when it was averaged last."""

    def average(self, engine: "Engine") -> None:
        """All ranks of all replicas call it at the same point."""
        changed = self._state(engine.gradients) != self._averaged
        every = self._ranks.every((changed, [sorted(gradient.present) for gradient in engine.gradients]))
        if any(theirs for theirs, _ in every):
            for index, gradient in enumerate(engine.gradients):
                present = {slot for _, held in every for slot in held[index]}
                if present:
                    self._average(engine, gradient, present)
        self._averaged = self._state(engine.gradients)

    def _average(self, engine: "Engine", gradient: Gradient, present: set[int]) -> None:
        if not present <= gradient.present or not gradient.held:
            engine.executor.make_room(0 if gradient.held else gradient.flat_bytes, f"gradients of {gradient.group.name}")
            gradient.hold(present)
        run = gradient.change()
        for start in range(0, run.numel(), PIECE_ELEMENTS):
            piece = run[start : start + PIECE_ELEMENTS]
            wide = piece.to(self._ranks.device, torch.promote_types(piece.dtype, torch.float32))
            piece.copy_(self._ranks.all_reduce_sum(wide).div_(self._ranks.size))

    def _state(self, gradients: list[Gradient]) -> list[tuple[int, frozenset[int]]]:
        return [(gradient.serial, frozenset(gradient.present)) for gradient in gradients]
