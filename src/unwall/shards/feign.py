"""Collectives with values that nobody will use.

A rank that fails has promised collectives to the others, who wait in them. It takes part in each, in order and without
waiting, so that everybody comes to the point where all ranks learn of the fault and give up what was under way.
"""

from collections.abc import Sequence

import torch

from unwall.shards.collectives import Collective, Ranks
from unwall.shards.gradient import Gradient
from unwall.shards.group import Group


class Feigned:
    """One rank's side of such collectives. They share their memory: what is in it means nothing."""

    def __init__(self, groups: Sequence[Group], gradients: Sequence[Gradient], ranks: Ranks, device: torch.device) -> None:
        self._groups = groups
        self._gradients = gradients
        self._ranks = ranks
        self._device = device
        self._scratch = torch.empty(0, dtype=torch.uint8, device=device)
        self._works: list[Collective] = []

    def gather(self, index: int, skip: int = 0) -> None:
        """A group's parameters. ``skip``: collectives of it that have begun already; so below."""
        group = self._groups[index]
        if group.gathers and not skip:
            part, whole, dtype = group.travels
            self._gather(part, whole, dtype)

    def gather_near(self, index: int, skip: int = 0) -> None:
        """The same inside the node."""
        group = self._groups[index]
        if group.replica is not None and not skip:
            part_numel, whole_numel = group.replica.travels
            whole, part = self._memory(whole_numel, part_numel, group.layout.dtype)
            self._works.append(group.replica.feign(whole, part))

    def reduce(self, index: int, skip: int = 0) -> None:
        """A group's gradients."""
        for begin in self._gradients[index].reducer.collectives(self._memory)[skip:]:
            self._works.append(begin())

    def end(self) -> None:
        """All ranks have come to all of them."""
        for work in self._works:
            work.wait()
        self._works.clear()
        self._scratch = self._scratch.new_empty(0)

    def _gather(self, part_numel: int, whole_numel: int, dtype: torch.dtype) -> None:
        whole, part = self._memory(whole_numel, part_numel, dtype)
        self._works.append(self._ranks.all_gather(whole, part))

    def _memory(self, whole: int, part: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        needed = (whole + part) * dtype.itemsize
        if self._scratch.numel() < needed:
            self._scratch = torch.zeros(needed, dtype=torch.uint8, device=self._device)
        flat = self._scratch[:needed].view(dtype)
        return flat[:whole], flat[whole:]
