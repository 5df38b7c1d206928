"""What becomes of gradients as autograd brings them: into the flat buffers of their groups, and on to the sum over the ranks.

[Note: only noted]
Of a small group whose gradients are copied at once (``Accumulator.waits``) the first and the last gradient that a backward
brings are taken with care. Between those two nothing changes that care is for, so of the others a note is made. Where something
did change, the check of it fails, and they are taken with care, too.
"""

from collections.abc import Callable, Iterable
from typing import Protocol

import torch
from torch import nn

from unwall.runtime.arrived import Arrived
from unwall.runtime.graph_task import GraphTasks
from unwall.runtime.home_stream import HomeStream
from unwall.runtime.places import Place, Places
from unwall.schedule.executor import Executor
from unwall.shards.accumulate import Accumulator
from unwall.shards.gradient import Gradient, Phase
from unwall.shards.group import Group
from unwall.shards.landing import AGAIN_ADVICE
from unwall.shards.local import local_gradient
from unwall.tiers.ledger import BudgetError, Ledger
from unwall.tiers.sizes import format_bytes

Note = tuple[nn.Parameter, int, torch.Size, Gradient, Accumulator, set[int]]
"""A parameter, its slot and its shape there; its group's gradient, what accumulates that, and the slots it awaits."""
_SUM = "the sum of several backwards, in fp32,"
_SUM_ADVICE = "Plan(passes=N) makes room for it: N is the number of backwards before a step. Or call step() after each one."
_TAKEN_ADVICE = (
    "The plan made room for it (passes={}), but something that it did not know of has taken that: the states of a second "
    "optimizer, perhaps, or what blocks keep on the host for backward. A host_bytes larger by {} makes room for both."
)
_TENSOR = torch.Tensor
_current_task = torch._C._current_graph_task_id
_is_grad_enabled, _NotAsked = torch.is_grad_enabled, torch._C.DisableTorchFunctionSubclass


class ShownGrads(Protocol):
    """What ``.grad`` of the parameters shows: see runtime/shown.py."""

    @property
    def any_shown(self) -> object:
        """Is true where any of them shows something."""

    def beginning(self) -> None: ...

    def take(self, param: nn.Parameter) -> torch.Tensor | None: ...


class Arrivals:
    """Takes gradients as they come, and has them reduced.

    ``shown`` takes what autograd brought out of ``.grad``. ``passes``: so many backwards before a step have room. ``arriving``
    is told of each group before a gradient of it is kept, and may refuse it. ``hand_out`` is called where whoever uses reduced
    gradients may be told of them. ``tasks``: the backwards that run; ``note_task`` is called in one that is not among them, and
    ``complete`` where a group has all its gradients. ``home_stream``: where gradients are copied and reduced.
    """

    def __init__(
        self,
        executor: Executor[Group, Gradient],
        places: Places,
        shown: ShownGrads,
        host: Ledger,
        passes: int,
        arriving: Callable[[int], None],
        hand_out: Callable[[], None],
        tasks: GraphTasks,
        note_task: Callable[[], int],
        complete: Callable[[int], None],
        home_stream: HomeStream,
    ) -> None:
        self._home, self._look, self._index = home_stream, home_stream.look, home_stream.index
        self.sync = True
        """Whether gradients are summed over the ranks when they are complete."""
        self.awaiting: list[set[int]] = [set() for _ in executor.groups]
        """By group: the slots whose gradients may come."""
        self.hooked: set[int] = set()
        """Parameters (by id) whose gradients come here."""
        self.count = 0
        """Gradients that have come, ever."""
        self.with_graph: set[tuple[Place, ...]] = set()
        """Of the backward that runs, parameters whose gradients came with a graph of their own: see runtime/held_grad.py."""
        self.noting: dict[int, Note] = {}
        """Parameters (by id) of whose gradients only a note is to be made. See [Note: only noted]."""
        self._to_note: dict[int, dict[int, Note]] = {}
        """By group: its parameters of which that may be so."""
        self._executor, self._gradients = executor, executor.gradients
        self._places = places
        self._shown, self._take_grad = shown, shown.take
        self._host = host
        self._passes = passes
        self._arriving = arriving
        self._hand_out = hand_out
        self._tasks, self._note_task = tasks, note_task
        self._complete = complete
        self._on_gradient = Arrived(self)

    def grown(self) -> None:
        """Groups were added."""
        self.awaiting += [set() for _ in range(len(self._executor.groups) - len(self.awaiting))]
        self._to_note.clear()

    def take_gradients_of(self, param: nn.Parameter) -> None:
        """From now on this parameter's gradient comes here (torch allows the hook on trainable parameters only)."""
        if param.requires_grad and id(param) not in self.hooked:
            param.register_post_accumulate_grad_hook(self._on_gradient)
            if hasattr(
                param, "grad_dtype"
            ):  # outside a pass a parameter is fp32 and its gradient the compute dtype: any will do
                param.grad_dtype = None
            self.hooked.add(id(param))

    def expect(self, param: nn.Parameter, places: tuple[Place, ...]) -> None:
        """Forward reads a trainable parameter: its gradient may come."""
        for index, slot in places:
            self.awaiting[index].add(slot)
        if id(param) not in self.hooked:  # frozen when the model was sharded, trained now
            self.take_gradients_of(param)

    def arrived(self, param: nn.Parameter) -> None:
        """Autograd has finished a parameter's gradient."""
        grad = self._take_grad(param)
        if grad is None:
            return
        if self._home.elsewhere:
            with self._home.visited(grad):
                self._take_one(param, grad)
        else:
            self._take_one(param, grad)

    def _take_one(self, param: nn.Parameter, grad: torch.Tensor) -> None:
        if _current_task() not in self._tasks:
            self._note_task()
        self.count += 1
        places = self._places[id(param)]
        for index, _ in places:
            if self._gradients[index].used:
                self._arriving(index)
        executor, with_graph = self._executor, _is_grad_enabled()
        if with_graph:
            self.with_graph.add(places)
            torch._C._set_grad_enabled(False)  # no context: this runs for each parameter
        try:
            if type(grad) is not _TENSOR or grad.is_sparse:  # what is plain is this rank's part, also of a DTensor
                grad = local_gradient(param, grad.to_dense() if grad.is_sparse else grad)
            for index, slot in places:
                gradient, awaited = self._gradients[index], self.awaiting[index]
                # A rank alone needs no more room for a flat buffer that it fills for the first time since the last step.
                if gradient.passes or not executor.alone or not gradient.arrived:
                    self._make_room(index, gradient)
                gradient.take(slot, grad)
                if slot not in awaited and slot in gradient.present:
                    self.await_again(index, slot)
                if slot in awaited:
                    awaited.remove(slot)
                    if not awaited:
                        if self.sync:
                            executor.reduce(index)
                        self._complete(index)
                    elif gradient.own.waits and executor.alone and id(param) not in self.noting:
                        self.noting.update(self._to_note.get(index) or self._notable(index))
        finally:
            if with_graph:
                torch._C._set_grad_enabled(True)
        if executor.reduced:
            self._hand_out()

    def note_arrival(self, param: nn.Parameter) -> bool:
        """Makes a note of a gradient. False where it is to be taken with care. See [Note: only noted]. One function, for the
        sake of few Python calls."""
        known, slot, shape, gradient, own, awaited = self.noting[id(param)]
        if (
            len(awaited) < 2
            or slot not in awaited
            or slot in own.arrived
            or own.flat is None
            or gradient.phase is not Phase.IDLE
            or gradient.passes
            or gradient.used
            or self._shown.any_shown
            or known is not param
            or _current_task() not in self._tasks
            or _is_grad_enabled()
            or self._look(self._index) != self._home.number
        ):
            return False
        with _NotAsked():  # parameters may be of a class that asks
            grad = param.grad
            if type(grad) is not _TENSOR or grad.is_sparse or grad.shape != shape:
                return False
            param.grad = None
        own.waiting.append((slot, grad))
        own.arrived.add(slot)
        awaited.remove(slot)
        self.count += 1
        return True

    def _notable(self, index: int) -> dict[int, Note]:
        gradient, awaited = self._gradients[index], self.awaiting[index]
        group, own = gradient.group, gradient.own
        pairs = enumerate(zip(group.params, group.layout.slots, strict=True))
        found = {id(p): (p, at, slot.shape, gradient, own, awaited) for at, (p, slot) in pairs if slot.whole and slot.numel}
        self._to_note[index] = found
        return found

    def _make_room(self, index: int, gradient: Gradient) -> None:
        executor = self._executor
        if not executor.fits_all and not executor.fits(nbytes := gradient.flat_bytes):
            executor.make_room_before(nbytes, keep=index)
            advice = AGAIN_ADVICE if gradient.sum_growth_bytes(gradient.present) else ""
            executor.make_room(gradient.flat_bytes, f"gradients of {gradient.group.name}", keep=index, advice=advice)

    def await_again(self, index: int, slot: int) -> None:
        """Several forwards came first, and what the backwards before this one brought comes again."""
        gradient = self._gradients[index]
        self.awaiting[index] |= (gradient.present | gradient.pending) - gradient.arrived
        self.awaiting[index].add(slot)

    def take_left(self, params: Iterable[nn.Parameter]) -> None:
        """Takes gradients of this rank that someone has put into ``.grad``, to be summed over the ranks at the step."""
        indices = set()
        for param in params:
            with torch._C.DisableTorchFunctionSubclass():
                grad, param.grad = param.grad, None
            if grad is None or id(param) not in self._places:
                continue
            for index, slot in self._places[id(param)]:
                self._arriving(index)
                gradient = self._gradients[index]
                self._executor.make_room(gradient.flat_bytes, f"gradients of {gradient.group.name}", keep=index)
                with torch.no_grad():
                    gradient.take(slot, local_gradient(param, grad))
                indices.add(index)
        for index in sorted(indices):
            self.keep_local(index)

    def keep_local(self, index: int) -> None:
        """``no_sync`` keeps whole gradients on every rank. Where they do not fit they are summed early: the same result."""
        gradient = self._gradients[index]
        if self._executor.has_room(gradient.local_bytes):
            self._executor.make_room(gradient.local_bytes, f"gradients of {gradient.group.name}", keep=index)
            gradient.keep_local()
        else:
            self._executor.reduce(index)

    def failed(self, error: BaseException | str) -> None:
        """A gradient could not be taken: the other ranks are told."""
        self._executor.agreement.fail(error, spoilt=True)

    def check_sums(self) -> None:
        """A backward begins that adds to what is held. BudgetError, before anything is changed, where there is no room."""
        if not any(gradient.present for gradient in self._gradients):
            return
        again = not any(self.awaiting)  # a graph of an earlier pass: nobody has said what will come
        pairs = zip(self._gradients, self.awaiting, strict=True)
        adding = [(gradient, gradient.present if again else awaited) for gradient, awaited in pairs]
        if any(gradient.group.home.one_pass and gradient.sum_growth_bytes(slots) for gradient, slots in adding):
            growth = sum(gradient.sum_growth_bytes(slots) for gradient, slots in adding)
            self._executor.expect_room(growth, _SUM, _SUM_ADVICE)
        if self._host.budget_bytes is None:
            return
        needed = sum(gradient.sum_bytes(slots) for gradient, slots in adding)
        for try_again in (True, False):
            free = self._host.free_bytes or 0
            if needed <= free:
                return
            if not try_again or not self._host.reclaim():
                break
        held = max(gradient.passes for gradient in self._gradients)
        advice = _SUM_ADVICE if held >= self._passes else _TAKEN_ADVICE.format(self._passes, format_bytes(needed - free))
        raise BudgetError("host", needed, self._host.live_bytes, self._host.budget_bytes, _SUM, advice)
