"""What the parameters of a group look like to Python: plain in a pass, of a class that sees everything otherwise.

[Note: open and closed]
A parameter of a resident group is a view of the flat buffer all the time, as far as autograd and C++ are concerned. Python sees
that in a pass only: a group that a pass uses is open, and its parameters are plain. Otherwise it is closed, and their class is
``away``, which knows what reads and writes outside a pass mean (runtime/absent.py). When a group is closed, what the pass has
written to its parameters in place is found out by their version counters and addresses, and ``written`` is told.
"""

from collections.abc import Callable, Sequence

import torch
from torch import nn

from unwall.shards.layout import Layout
from unwall.shards.local import local, show


class Faces:
    """Of one group's parameters. See [Note: open and closed]."""

    def __init__(self, params: Sequence[nn.Parameter], layout: Layout) -> None:
        self.is_open = True
        self.away: type[nn.Parameter] | None = None
        """None: there is no such class (yet), and parameters are always plain."""
        self.written: Callable[[list[int]], None] | None = None
        """Told of the slots that a pass has written to in place."""
        self._params = params
        self._plain = type(params[0]) if params else nn.Parameter
        """DTensors and other parameters are never in one group."""
        self._layout = layout
        self._versions: list[int] = []
        item = layout.dtype.itemsize
        self._offsets = [slot.offset * item if slot.whole and slot.numel else -1 for slot in layout.slots]
        """In bytes, of what is shown of the flat buffer."""

    def show(self, slot: int, tensor: torch.Tensor) -> None:
        """The parameter is plain and shows ``tensor``."""
        param = self._params[slot]
        if type(param) is self.away:
            param.__class__ = self._plain
        show(param, tensor)

    def hide(self, slot: int) -> None:
        """No pass is shown this parameter."""
        if self.away is not None and type(self._params[slot]) is self._plain:
            self._params[slot].__class__ = self.away

    def opened(self) -> None:
        """All parameters show the flat buffer: what is written from now on counts."""
        self.is_open = True
        self._versions = _versions(self._params) if self.away is not None else []

    def open(self) -> None:
        """A pass uses the group, which is resident."""
        if self.is_open:
            return
        for slot, param in enumerate(self._params):
            if type(param) is self.away and self._layout.slots[slot].whole:
                param.__class__ = self._plain
        self.opened()

    def close(self, flat: torch.Tensor | None) -> None:
        """No pass uses the group any more. ``flat``: its flat buffer, which the parameters show, or None."""
        if not self.is_open or self.away is None:
            return
        changed = [] if flat is None or self.written is None else self._changed(flat)
        self.is_open = False
        try:
            if changed and self.written is not None:
                self.written(changed)
        finally:
            for slot in range(len(self._params)):
                self.hide(slot)

    def _changed(self, flat: torch.Tensor) -> list[int]:
        if len(self._versions) != len(self._params):
            return []
        versions, start = _versions(self._params), flat.data_ptr()
        return [
            at
            for at, (param, offset) in enumerate(zip(self._params, self._offsets, strict=True))
            if offset >= 0
            and (versions[at] != self._versions[at] or local(param).data_ptr() != start + offset)
            and type(param) is self._plain
        ]


def _versions(params: Sequence[nn.Parameter]) -> list[int]:
    try:
        return [param._version for param in params]
    except RuntimeError:  # inference tensors count nothing
        return [0] * len(params)
