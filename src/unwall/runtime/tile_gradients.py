"""Gradients of parameters in tiles, on their way into the groups' flat gradients. See [Note: tiled operators] in
runtime/tiling.py."""

from collections import Counter
from collections.abc import Callable

import torch
from torch import nn

from unwall.runtime.places import Place, Places
from unwall.schedule.executor import Executor
from unwall.shards.gradient import Gradient
from unwall.shards.group import Group

Write = Callable[[torch.Tensor, bool], None]
"""Puts a gradient into its place in the flat buffer. It is told whether nothing is there yet."""


class TileGradients:
    """``arriving`` is told of each group before a gradient of it is kept, and may refuse it. ``awaiting``: the slots of each
    group that a gradient may come for."""

    def __init__(
        self,
        executor: Executor[Group, Gradient],
        places: Places,
        arriving: Callable[[int], None],
        awaiting: list[set[int]],
    ) -> None:
        self._executor = executor
        self._places = places
        self._arriving = arriving
        self._awaiting = awaiting
        self._passes = 0
        self._uses: Counter[Place] = Counter()
        """Uses of each tile in this pass whose backward has not come yet."""
        self._filled: dict[int, set[Place]] = {}
        """By the id of a parameter: the tiles that got a gradient in the running backward."""

    def restart(self) -> None:
        """A pass begins."""
        self._passes += 1
        self._uses.clear()

    def expect(self, place: Place) -> int:
        """Forward reads a tile whose gradient will come. The result is for ``take``."""
        self._awaiting[place.group].add(place.slot)
        if torch._C._current_graph_task_id() != -1:  # a checkpoint recomputes: the use was counted
            return 0
        self._uses[place] += 1
        return self._passes

    def take(self, param: nn.Parameter, place: Place, use: int, write: Write, sync: bool) -> None:
        """A part of a tile's gradient is known. After the last use of the pass it is reduced; where that cannot be told, at the
        end of backward or when memory is needed."""
        self._filled.setdefault(id(param), set()).add(place)
        if use == self._passes:
            self._uses[place] -= 1
        self._write(place, write, self._uses[place] <= 0, sync)

    def _write(self, place: Place, write: Write, last: bool, sync: bool) -> None:
        index, slot = place
        self._arriving(index)
        gradient = self._executor.gradients[index]
        self._executor.make_room_before(gradient.flat_bytes, keep=index)
        self._executor.make_room(gradient.flat_bytes, f"gradients of {gradient.group.name}", keep=index)
        with torch.no_grad():
            gradient.take_in(slot, write)
        if last:
            self._awaiting[index].discard(slot)
            if sync:
                self._executor.reduce(index)

    def end(self, sync: bool) -> None:
        """A parameter has a gradient as a whole: tiles that nothing came for (experts that nobody chose) get zeros."""
        for key, filled in self._filled.items():
            for place in self._places.get(key, ()):
                gradient = self._executor.gradients[place.group]
                if place not in filled and place.slot not in gradient.present | gradient.pending:
                    self._write(place, _zero, True, sync)
        self.forget()

    def forget(self) -> None:
        """A backward is over, well or not."""
        self._filled.clear()


def _zero(target: torch.Tensor, fresh: bool) -> None:
    if fresh:
        target.zero_()
