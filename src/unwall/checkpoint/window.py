"""A stretch of a group's owned run, with its states as tensors, on whatever tier they live.

On device and host a state is a tensor anyway. On disk only the stretch is brought into host memory, and goes back from there:
looking through a group needs memory for a stretch, not for the group.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch

from unwall.shards.group import Group
from unwall.shards.master import join, split_into
from unwall.shards.states import MASTER, REMAINDER
from unwall.shards.store import Store
from unwall.tiers.block import DiskBlock, Region
from unwall.tiers.sizes import ALIGNMENT
from unwall.tiers.tiers import Tiers

STRETCH_ELEMENTS = 1 << 22
"""Elements that are looked at together: a multiple of what O_DIRECT asks for in every dtype."""


def stretches(group: Group) -> Iterator[tuple[int, int]]:
    """The owned run, cut into stretches."""
    for start in range(0, group.own_numel, STRETCH_ELEMENTS):
        yield start, min(group.own_numel, start + STRETCH_ELEMENTS)


class Window:
    """Elements ``start`` to ``stop`` of a group's owned run, in full precision."""

    def __init__(self, group: Group, start: int, stop: int, states: dict[str, torch.Tensor]) -> None:
        self._group = group
        self._start = start
        self._numel = stop - start
        self._states = states

    def put(self, start: int, values: torch.Tensor) -> None:
        """Sets parameters and master from element ``start`` of the run on (any float dtype, or the parameters' own)."""
        span = slice(start - self._start, start - self._start + values.numel())
        param = self._states["param"][span]
        if self._group.layout.dtype is torch.bfloat16:
            rest = self._states.get(REMAINDER.name)
            if values.dtype is torch.bfloat16:  # they are the upper half, and nothing is left over
                param.copy_(values)
                if rest is not None:
                    rest[span].zero_()
                return
            split_into(param, None if rest is None else rest[span], values, self._group.pool)
            return
        if MASTER.name in self._states:
            self._states[MASTER.name][span].copy_(values)
        param.copy_(values)

    def get(self, start: int, numel: int) -> torch.Tensor:
        """Elements in full precision: fp32, or the parameters' own dtype where that is the master. May share memory."""
        span = slice(start - self._start, start - self._start + numel)
        if MASTER.name in self._states:
            return self._states[MASTER.name][span]
        param, rest = self._states["param"][span], self._states.get(REMAINDER.name)
        return param if rest is None else join(param, rest[span], self._group.pool)


@contextmanager
def window(tiers: Tiers, group: Group, start: int, stop: int, write: bool) -> Iterator[Window]:
    """Without ``write`` what is in it must not be changed. ``start`` is where a stretch begins."""
    stores = {spec.name: group.states[spec.key()] for spec in (REMAINDER, MASTER) if group.has_state(spec)}
    with ExitStack() as stack:
        if group.param is None:
            states = {"param": group.own_param_for(write)[start:stop]}
        else:
            states = {"param": stack.enter_context(_stretch(tiers, group.param, start, stop, write))}
        for name, store in stores.items():
            states[name] = stack.enter_context(_stretch(tiers, store, start, stop, write))
        yield Window(group, start, stop, states)


@contextmanager
def _stretch(tiers: Tiers, store: Store, start: int, stop: int, write: bool) -> Iterator[torch.Tensor]:
    block = store.block  # after an update that is under way, and after what was looked at has gone back
    if not isinstance(block, DiskBlock):
        yield store.tensor(write)[start:stop]
        return
    low, nbytes = start * store.dtype.itemsize, (stop - start) * store.dtype.itemsize
    assert low % ALIGNMENT == 0
    staged = tiers.host.allocate(nbytes, f"{store.label}, a part of it")
    try:
        region = Region(block, low, nbytes)
        tiers.links.copy(region, Region.whole(staged), store.label).wait()
        yield staged.view(store.dtype)
        if write:
            tiers.links.copy(Region.whole(staged), region, store.label).wait()
    finally:
        tiers.host.free(staged)
