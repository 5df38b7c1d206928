"""Which parameters show a gradient, and what the user has made of their ``.grad``.

[Note: .grad by hand]
From the end of a backward until ``step`` or ``zero_grad`` a parameter with a gradient shows a ``HeldGrad``
(runtime/held_grad.py). The user may set ``.grad`` meanwhile, as on a plain model:

None     the gradient is forgotten.
tensor   it is the gradient from now on, in place of what was held. It counts as it is, and is not averaged over the ranks: as
         with DistributedDataParallel, every rank sets the same. Where they do not, or only some of them do, that raises.

Nobody is told when that happens. It is found when it matters: at ``step``, when gradients are looked at, and when the next
backward brings a gradient.
"""

import sys
from collections.abc import Iterable
from operator import attrgetter, is_
from typing import TYPE_CHECKING

import torch
from torch import nn

from unwall.runtime.gradients import GradientAccess, Places
from unwall.runtime.held_grad import HeldGrad
from unwall.runtime.load_check import as_bytes
from unwall.shards.local import local_part_of

if TYPE_CHECKING:
    from unwall.runtime.engine import Engine

_grad_of = attrgetter("grad")
_ASKS_NOBODY = nn.Parameter.__torch_function__


class Shown:
    """See [Note: .grad by hand]."""

    def __init__(self, engine: "Engine") -> None:
        self.access = GradientAccess(engine)
        self._engine = engine
        self._known: tuple[tuple[int, int], dict[Places, nn.Parameter]] = ((0, 0), {})
        self._marks: dict[Places, object] = {}
        """Parameters that show a gradient. Each time one is shown it gets another mark."""
        self.any_shown = self._marks
        self._made: dict[Places, HeldGrad] = {}
        """Kept for the next time: making one takes longer than showing it."""
        self._had: set[Places] = set()
        """Parameters that had a gradient since it was last set to None: ``zero_grad(set_to_none=False)`` gives them zeros."""
        self._zeros: set[Places] = set()
        """Parameters whose gradient is zero until a backward adds to it."""
        self._running = False
        """A backward has brought gradients and has not ended."""

    # -- around a backward --------------------------------------------------------------------------------------------

    def show(self) -> None:
        """Backward has ended: every parameter that has a gradient on some rank shows it."""
        self._running = False
        marks, known, found = self._marks, self._engine.places, dict[Places, nn.Parameter]()
        for group, gradient in zip(self._engine.groups, self._engine.gradients, strict=True):
            params = group.params
            for slot in gradient.known:
                places = known.get(id(params[slot]))
                if places is not None and places not in marks:
                    found[places] = params[slot]
        self._show(found.items())
        for places in self._engine.backward.arrivals.with_graph:
            if places in self._marks:
                self._made[places].graph = True
        self._engine.backward.arrivals.with_graph.clear()

    def take(self, param: nn.Parameter) -> torch.Tensor | None:
        """What autograd has brought for a parameter, taken out of ``.grad``."""
        if not self._running:
            self.bringing(param)
        if not self._marks and type(param).__torch_function__ is _ASKS_NOBODY:
            grad = param.grad
            param.grad = None
            return grad
        with torch._C.DisableTorchFunctionSubclass():  # parameters may be of a class that asks
            grad = param.grad
            if not self._marks:
                param.grad = None
                return grad
            return self._take_shown(param, grad)

    def _take_shown(self, param: nn.Parameter, grad: torch.Tensor | None) -> torch.Tensor | None:
        """The same where parameters show what backwards before this one brought."""
        places = self._engine.places[id(param)]
        if isinstance(grad, HeldGrad) and places in self._marks:
            held = self._made[places]
            grad, held.incoming = held.incoming, None
            param.grad = held
            return grad
        if places in self._marks:  # the user has cleared it, or put something else there, before autograd added to it
            self._forget([places])
        param.grad = None
        return grad

    def beginning(self) -> None:
        """A backward begins, perhaps after one that failed. What the user did to ``.grad`` counts now: other ranks may bring
        gradients before this one does, and those are not to be forgotten."""
        self._running = False
        self.bringing(None)

    def bringing(self, param: nn.Parameter | None) -> None:
        """A backward brings a gradient, the first one perhaps: what the user did to ``.grad`` before counts. ``param``: what it
        has brought into ``.grad`` already."""
        if not self._running:
            self._running = True
            self._engine.audience.looked_at()
            if self._marks:
                self.adopt(but=param, begun=True)

    # -- what the user does -------------------------------------------------------------------------------------------

    def adopt(self, but: nn.Parameter | None = None, begun: bool = False) -> None:
        """Takes what the user has made of ``.grad``. ``begun``: a backward has, and has brought the gradient of ``but``."""
        cleared, given, made, params = [], [], self._made, self._params
        with torch._C.DisableTorchFunctionSubclass():
            if len(self._marks) == len(params) and all(map(is_, map(_grad_of, params.values()), map(made.get, params))):
                return  # as it mostly is: without a Python call for each of them
            for places, param in params.items():
                grad = param.grad
                if grad is None:
                    if places in self._marks and param is not but:
                        cleared.append(places)
                elif grad is not made.get(places) and param is not but and not self._is_own(grad, places):
                    given.append(places)
        if not cleared and not given:
            return
        if not begun:
            self._engine.audience.looked_at()
            if self._engine.ranks.size > 1:
                self._compare(cleared, given)
        self._forget(cleared)
        for places in given:
            grad = self._params[places].grad
            assert grad is not None
            value = grad.whole() if isinstance(grad, HeldGrad) else grad
            self._forget([places])
            self.access.put(places, value)
            self._show([(places, self._params[places])])

    def _is_own(self, grad: torch.Tensor, places: Places) -> bool:
        """Whether it is what the parameter there shows, and not that of another one, or of another model."""
        return isinstance(grad, HeldGrad) and grad.places == places and not grad.views and grad.access() is self.access

    def settle(self, params: Iterable[nn.Parameter]) -> None:
        """Before a step: what the user left in ``.grad`` counts, zeros too where they are of these ``params``: those of another
        optimizer's would be added to by a backward before its step."""
        self.adopt()
        if self._zeros:
            mine = {self._engine.places.get(id(param)) for param in params}
            for places in [places for places in self._zeros if places in mine]:
                self.access.hold(places)
                self._zeros.discard(places)

    def note_cleared(self) -> None:
        """Before gradients are forgotten: what the user has set to None has none that could become zeros."""
        with torch._C.DisableTorchFunctionSubclass():
            self._had -= {places for places in self._marks if self._params[places].grad is None}

    def clear(self, params: Iterable[nn.Parameter], set_to_none: bool) -> None:
        """``zero_grad``, after the gradients were forgotten: ``.grad`` is None, or zeros where there was one."""
        with torch._C.DisableTorchFunctionSubclass():
            for param in params:
                if param.grad is not None:
                    param.grad = None
                places = self._engine.places.get(id(param))
                if places is None:
                    continue
                self._marks.pop(places, None)  # also where a failed pass has forgotten the gradient
                if set_to_none:
                    self._had.discard(places)
                    self._zeros.discard(places)
                elif places in self._had:
                    self._zeros.add(places)
                    self._show([(places, param)])

    def hide(self, every: Iterable[Places | None]) -> None:
        """Gradients were used, or forgotten."""
        params = self._params
        with torch._C.DisableTorchFunctionSubclass():  # parameters may be of a class that asks
            for places in every:
                if places is not None and self._marks.pop(places, None) is not None:
                    params[places].grad = None

    def hide_for_a_while(self) -> None:
        """Whoever writes to ``.grad`` meanwhile finds nothing there. ``show`` ends that."""
        self.adopt()
        with torch._C.DisableTorchFunctionSubclass():
            for places in self._marks:
                self._params[places].grad = None
        self._marks.clear()

    def hide_all(self) -> None:
        self.hide(list(self._marks))

    @property
    def _params(self) -> dict[Places, nn.Parameter]:
        """All parameters. Some may come after ``shard``."""
        engine = self._engine
        size = (len(engine.groups), len(engine.places))
        if self._known[0] != size:
            self._known = size, {places: _param(engine, places) for places in engine.places.values()}
        return self._known[1]

    # -- parts --------------------------------------------------------------------------------------------------------

    def _show(self, every: Iterable[tuple[Places, nn.Parameter]]) -> None:
        marks, kept, had, mark = self._marks, self._made, self._had, object()
        with torch._C.DisableTorchFunctionSubclass():
            for places, param in every:
                marks[places] = mark
                had.add(places)
                made = kept.get(places)
                # A HeldGrad that someone has kept stays what it was: gone. (Three: the dictionary, ``made``, the argument.)
                if made is None or sys.getrefcount(made) > 3:
                    made = kept[places] = HeldGrad.make(self.access, places, marks)
                made.mark, made.graph, made.incoming = mark, False, None  # what came to one that was forgotten is not added
                param.grad = made

    def _forget(self, every: list[Places]) -> None:
        by_group: dict[int, set[int]] = {}
        for places in every:
            self._had.discard(places)
            self._zeros.discard(places)
            self.hide([places])
            for index, slot in places:
                by_group.setdefault(index, set()).add(slot)
        for index, slots in by_group.items():
            self._engine.audience.refuse_if_used(index)
            self._engine.discard_gradients(index, slots)

    def _compare(self, cleared: list[Places], given: list[Places]) -> None:
        """ValueError, on every rank, where they have not all done the same."""
        self._engine.together("gradients set by hand")
        mine: dict[Places, int | None] = dict.fromkeys(cleared)
        mine.update({places: _checksum(self._params[places]) for places in given})
        every: list[dict[Places, int | None]] = self._engine.ranks.every(mine)
        for places in dict.fromkeys(places for theirs in every for places in theirs):
            if len({theirs.get(places, "left alone") for theirs in every}) > 1:
                raise ValueError(
                    f"the .grad of {_name(self._engine, places)} was set by hand, but not to the same on every rank: set the "
                    "same tensor (or None) on all ranks, or change this rank's elements with unwall.grads(model).set_part"
                )


def _param(engine: "Engine", places: Places) -> nn.Parameter:
    return engine.groups[places[0].group].params[places[0].slot]


def _name(engine: "Engine", places: Places) -> str:
    return engine.groups[places[0].group].layout.slots[places[0].slot].name


def _checksum(param: nn.Parameter) -> int:
    """The same for the same bits, whatever order they are added in."""
    grad = param.grad
    assert grad is not None
    values = grad.whole() if isinstance(grad, HeldGrad) else grad.detach()
    values = local_part_of(param, values.to_dense() if values.is_sparse else values)
    return int(as_bytes(values).long().mul_(_weights(values)).sum())


def _weights(values: torch.Tensor) -> torch.Tensor:
    """So that two elements that have changed places are noticed."""
    return torch.arange(1, values.numel() * values.itemsize + 1, device=values.device) % 65521
