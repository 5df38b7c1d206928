"""What the parameters of a group look like to Python: plain in a pass, of a class that sees everything otherwise.

[Note: open and closed]
A parameter of a resident group is a view of the flat buffer all the time, as far as autograd and C++ are concerned. Python sees
that in a pass only: a group that a pass uses is open, and its parameters are plain. Otherwise it is closed, and their class is
``away``, which knows what reads and writes outside a pass mean (runtime/absent.py). When a group is closed, what the pass has
written to its parameters in place is found out by their version counters and addresses, and ``written`` is told. What
``param.data`` gives counts its writes apart from the parameter: the class in a pass, ``near``, is ``nn.Parameter`` but that it
tells of each such tensor (``lent``), whose counter is then looked at, too.

[Note: placeholders]
The parameter of an absent group is one NaN expanded to its shape: shape, device and numel stay true, and what reaches it past
all that watches reads NaN (loud, never garbage). The nn.Parameter object itself is the user's; only its class changes.

[Note: overwritten halves]
Where the flat buffer is the home of bf16 parameters it is the upper half of their masters. A write there would leave it open
which elements it has changed, and so which remainders still belong to them. So before a write that is seen coming (``.data``, a
method in place), and in every pass after one that was not (through a view), the halves of that parameter are copied.

[Note: updated while backward runs]
An update ahead of the step may write a parameter when its gradient is known. A checkpoint that recomputes after that may read
it once more, past autograd (``.detach()``, ``no_grad``), and would go on with values that forward did not have. So from then on
to the end of the backward the parameter is closed, whatever else of its group is open, and reading it raises; what autograd has
saved of it counts as overwritten. Where the update writes on the host, what the device shows is as before until it is dropped.
"""

from collections.abc import Callable, Sequence, Set
from operator import attrgetter

import torch
from torch import nn
from torch.autograd.graph import increment_version

from unwall.shards.layout import Layout
from unwall.shards.local import is_distributed, local, show


class Faces:
    """Of one group's parameters. See [Note: open and closed]."""

    def __init__(self, params: Sequence[nn.Parameter], layout: Layout, device: torch.device) -> None:
        self.is_open = True
        self.away: type[nn.Parameter] | None = None
        """None: there is no such class (yet), and parameters are always plain."""
        self.near: type[nn.Parameter] = nn.Parameter
        """The class in a pass."""
        self.written: Callable[[list[int]], None] | None = None
        """Told of the slots that a pass has written to in place."""
        self.is_half: Callable[[], bool] = lambda: False
        """Whether what is shown is the half of a master. See [Note: overwritten halves]."""
        self.before: dict[int, torch.Tensor] = {}
        """By slot, what it was before it was written to."""
        self._rewritten: set[int] = set()
        self._updated: set[int] = set()
        """Slots that were updated elsewhere. See [Note: updated while backward runs]."""
        self._outdated: set[int] = set()
        """Slots that have other values now than forward has seen."""
        self._is_there = True
        """Not put away."""
        self._params = params
        self._plain = type(params[0]) if params else nn.Parameter
        """DTensors and other parameters are never in one group."""
        self._spread = bool(params) and is_distributed(params[0])
        """They are DTensors."""
        self._layout = layout
        placeholder = _placeholder(layout.dtype, device)
        self._placeholders = [placeholder.expand(slot.shape) for slot in layout.slots]
        self._versions: list[int] = []
        self._lent: list[tuple[int, torch.Tensor, int]] = []
        """What ``.data`` gave in this pass: of which slot, what shares its counter, and what that was."""
        item = layout.dtype.itemsize
        self._offsets = [slot.offset * item if slot.whole and slot.numel else -1 for slot in layout.slots]
        """In bytes, of what is shown of the flat buffer."""
        self._known_addresses: tuple[int, list[int]] = (-1, [])
        """Of a flat buffer that begins there. See ``_addresses``."""

    def show(self, slot: int, tensor: torch.Tensor) -> None:
        """The parameter is plain and shows ``tensor``."""
        param = self._params[slot]
        if type(param) in (self.away, self.near):
            param.__class__ = self._plain
        show(param, tensor)

    def hide(self, slot: int) -> None:
        """No pass is shown this parameter."""
        if self.away is not None and type(self._params[slot]) in (self._plain, self.near):
            self._params[slot].__class__ = self.away

    def hide_all(self) -> None:
        """No pass is shown any of them."""
        away, plain, near = self.away, self._plain, self.near
        for param in self._params if away is not None else ():
            kind = type(param)
            if kind is plain or kind is near:
                param.__class__ = away  # type: ignore[assignment]

    def show_all(self, tensors: Sequence[torch.Tensor], whole: Sequence[bool] | None = None) -> None:
        """All parameters are plain and show their tensor, or those that are ``whole``."""
        away, plain, near, spread = self.away, self._plain, self.near, self._spread
        for slot, param in enumerate(self._params):
            if whole is not None and not whole[slot]:
                continue
            kind = type(param)
            if kind is near or kind is away:
                param.__class__ = plain
            if spread:
                show(param, tensors[slot])
            else:
                param.data = tensors[slot]

    def put_away(self) -> None:
        """All parameters are placeholders. See [Note: placeholders]."""
        self.show_all(self._placeholders)
        self.hide_all()
        self.is_open = self._is_there = False
        self._outdated |= self._updated

    def put_away_one(self, slot: int) -> None:
        self.show(slot, self._placeholders[slot])
        self.hide(slot)

    def opened(self) -> None:
        """All parameters show the flat buffer: what is written from now on counts."""
        self.is_open = self._is_there = True
        self._lent.clear()
        if self._outdated:
            increment_version([self._params[slot] for slot in self._outdated])
        self._versions = _versions(self._params) if self.away is not None else []
        plain, near = self._plain, self.near
        for param, offset in zip(self._params, self._offsets, strict=True) if self.away is not None else ():
            if offset >= 0 and type(param) is plain:
                param.__class__ = near
        for slot in self._outdated:
            self.hide(slot)
        for slot in self._rewritten:
            self.may_be_written(slot)

    def lent(self, slot: int, data: torch.Tensor) -> None:
        """A pass has read ``.data`` of a parameter."""
        if self.is_open and not data.is_inference():
            self._lent.append((slot, data.detach(), data._version))  # shares the counter, and outlives what it counts for
            self.may_be_written(slot)

    def updated(self, slots: Set[int], *, here: bool) -> None:
        """An update writes parameters ahead of the step, perhaps in a backward. ``here``: it has written what they show.
        Autograd counts that as a write in place, and it is none of the user's. See [Note: updated while backward runs]."""
        if not here and self._is_there:
            self._updated |= slots
            return
        before = _versions(self._params)
        increment_version([self._params[slot] for slot in slots])
        more = [now - then for now, then in zip(_versions(self._params), before, strict=True)]
        if self._versions:
            self._versions = [version + further for version, further in zip(self._versions, more, strict=True)]
        self._outdated |= slots
        for slot in slots:
            self.hide(slot)

    def check_current(self, slot: int) -> None:
        """RuntimeError where a backward is about to read what was updated meanwhile."""
        if slot in self._outdated:
            raise RuntimeError(
                f"{self._layout.slots[slot].name} is read in backward after update_in_backward=True has updated it (as in a "
                "checkpoint that uses it detached): the gradients would not be those of this forward. Build the optimizer "
                "without update_in_backward, and the model with Plan(grads='auto')"
            )

    def backward_ended(self) -> None:
        """What was updated may be read again."""
        if self._outdated:
            self.close(None)  # it is open after a backward that failed: then the next use opens all of it
        self._updated.clear()
        self._outdated.clear()

    def may_be_written(self, slot: int) -> None:
        """See [Note: overwritten halves]."""
        if self.is_open and slot not in self.before and self.is_half():
            self.before[slot] = local(self._params[slot]).detach().clone()

    def open(self) -> None:
        """A pass uses the group, which is resident."""
        if self.is_open:
            return
        away, near, plain = self.away, self.near, self._plain
        for param, slot, offset in zip(self._params, self._layout.slots, self._offsets, strict=True):
            if type(param) is away and slot.whole:
                param.__class__ = near if offset >= 0 else plain
        self.opened()

    def close(self, flat: torch.Tensor | None) -> None:
        """No pass uses the group any more. ``flat``: its flat buffer, which the parameters show, or None."""
        if not self.is_open or self.away is None:
            return
        changed = [] if flat is None or self.written is None else self._changed(flat)
        self._lent.clear()
        self.is_open = False
        try:
            if changed and self.written is not None:
                self._rewritten.update(changed)
                self.written(changed)
        finally:
            self.before.clear()
            self.hide_all()

    def _addresses(self, start: int) -> list[int]:
        """Where the parameters are that show a flat buffer which begins there. None of them, where not all do."""
        if self._known_addresses[0] != start:
            whole = not self._spread and all(offset >= 0 for offset in self._offsets)
            self._known_addresses = start, [start + offset for offset in self._offsets] if whole else []
        return self._known_addresses[1]

    def _changed(self, flat: torch.Tensor) -> list[int]:
        if len(self._versions) != len(self._params):
            return []
        versions, start = _versions(self._params), flat.data_ptr()
        if not self._lent and not self._outdated and versions == self._versions and (known := self._addresses(start)):
            with torch._C.DisableTorchFunctionSubclass():
                if list(map(_address, self._params)) == known:
                    return []  # as it mostly is
        through_data = {slot for slot, tensor, version in self._lent if tensor._version != version}
        parts = [local(param) for param in self._params] if self._spread else self._params
        return [
            at
            for at, (param, part, offset) in enumerate(zip(self._params, parts, self._offsets, strict=True))
            if offset >= 0
            and type(param) in (self._plain, self.near)
            and (versions[at] != self._versions[at] or part.data_ptr() != start + offset or at in through_data)
        ]


_address = torch.Tensor.data_ptr
_version = attrgetter("_version")


def _versions(params: Sequence[nn.Parameter]) -> list[int]:
    try:
        return list(map(_version, params))
    except RuntimeError:  # inference tensors count nothing
        return [0] * len(params)


def _placeholder(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    if dtype is torch.bool:
        return torch.zeros((), dtype=dtype, device=device)
    value = float("nan") if dtype.is_floating_point or dtype.is_complex else torch.iinfo(dtype).min
    return torch.full((), value, dtype=dtype, device=device)
