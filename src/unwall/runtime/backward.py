"""Autograd's progress through a sharded model: which groups backward reads, which gradients are still to come.

[Note: pins]
Forward: a group is pinned while a call that reads it is on the stack. Backward: softly ([Note: two kinds of pins] in
schedule/pins.py), from the moment the gradient of such a call's output is known until every gradient that is awaited from the
group has arrived and, for frozen parameters, the call's own nodes have run. A node that reads a parameter also produces that
parameter's gradient, so "all gradients in" means "read no more". What cannot be followed (an output in an unknown wrapper, a
gradient that never comes) stays pinned to the end of the pass: memory, never a wrong value.

[Note: numbers of nodes]
Autograd numbers its nodes as forward makes them, and runs, of those that may run, the one with the highest number. So when it
has come to a node from before a call, all of the call's own have run. This is looked at where the next call's backward begins.
Where autograd has several queues (a model on a device and the host) it may be too early or too late: what is still read is
fetched again, and what is not needed stays until something else needs the room.

[Note: only noted]
Of a small group whose gradients are copied at once (``Accumulator.waits``) the first and the last gradient that a backward
brings are taken with care. Between those two nothing changes that care is for, so of the others a note is made. Where something
did change, the check of it fails, and they are taken with care, too.
"""

from collections.abc import Callable, Iterable
from typing import Protocol

import torch
from torch import nn

from unwall.native import interrupts
from unwall.runtime import transforms
from unwall.runtime.arrived import Arrived
from unwall.runtime.calls import Call
from unwall.runtime.graph_task import GraphTask, GraphTasks, node_number
from unwall.runtime.places import Place, Places
from unwall.runtime.tile_gradients import TileGradients, Write
from unwall.runtime.turns import Turn
from unwall.schedule.executor import Executor
from unwall.shards.gradient import Gradient, Phase
from unwall.shards.group import Group, Residence, close_all
from unwall.shards.landing import AGAIN_ADVICE
from unwall.shards.local import local_gradient
from unwall.tiers.ledger import BudgetError, Ledger
from unwall.tiers.sizes import format_bytes

_SUM = "the sum of several backwards, in fp32,"
_SUM_ADVICE = "Plan(passes=N) makes room for it: N is the number of backwards before a step. Or call step() after each one."
_TAKEN_ADVICE = (
    "The plan made room for it (passes={}), but something that it did not know of has taken that: the states of a second "
    "optimizer, perhaps, or what blocks keep on the host for backward. A host_bytes larger by {} makes room for both."
)
_TENSOR = torch.Tensor
_current_task, _current_node = torch._C._current_graph_task_id, torch._C._current_autograd_node
_is_grad_enabled, _NotAsked = torch.is_grad_enabled, torch._C.DisableTorchFunctionSubclass


class ShownGrads(Protocol):
    """What ``.grad`` of the parameters shows: see runtime/shown.py."""

    @property
    def any_shown(self) -> object:
        """Is true where any of them shows something."""

    def beginning(self) -> None: ...

    def take(self, param: nn.Parameter) -> torch.Tensor | None: ...


class Backward:
    """Pins what backward reads, takes the gradients as they arrive and has them reduced. See [Note: pins].

    ``shown`` takes what autograd brought out of ``.grad``. ``arriving`` is told of each group before a gradient of
    it is kept, and may refuse it. ``hand_out`` is called where whoever uses reduced gradients may be told of them. ``passes``:
    so many backwards before a step have room.
    """

    def __init__(
        self,
        executor: Executor[Group, Gradient],
        places: Places,
        shown: ShownGrads,
        host: Ledger,
        arriving: Callable[[int], None],
        hand_out: Callable[[], None],
        turn: Turn,
        passes: int,
    ) -> None:
        self.sync = True
        """Whether gradients are summed over the ranks when they are complete."""
        self._executor = executor
        self._gradients = executor.gradients
        self._places = places
        self._shown, self._take_grad = shown, shown.take
        self._host = host
        self._arriving = arriving
        self._hand_out = hand_out
        self._turn = turn
        self._passes = passes
        self.awaiting: list[set[int]] = [set() for _ in executor.groups]
        """By group: the slots whose gradients may come."""
        self.tiles = TileGradients(executor, places, arriving, self.awaiting)
        self._open_calls = [0] * len(executor.groups)
        self._open: list[Call] = []
        """Calls with frozen parameters whose backward has begun, the innermost last. See [Note: numbers of nodes]."""
        self._tasks = GraphTasks()
        self._reads: dict[int, tuple[int, set[int]]] = {}
        """By graph task: the node that reads now, or read last, by its number, and the groups it was given tensors of."""
        executor.pins.being_read = self._being_read
        self.hooked: set[int] = set()
        """Parameters (by id) whose gradients come here."""
        self.arrivals = 0
        """Gradients that have come, ever."""
        self.with_graph: set[tuple[Place, ...]] = set()
        """Of the backward that runs, parameters whose gradients came with a graph of their own: see runtime/held_grad.py."""
        self.noting: dict[int, Place] = {}
        """Parameters (by id) of whose gradients only a note is to be made. See [Note: only noted]."""
        self._to_note: dict[int, dict[int, Place]] = {}
        """By group: its parameters of which that may be so."""
        self._on_gradient = Arrived(self)

    # -- what forward announces ---------------------------------------------------------------------------------------

    def grown(self) -> None:
        """Groups were added."""
        added = len(self._executor.groups) - len(self.awaiting)
        self.awaiting += [set() for _ in range(added)]
        self._open_calls += [0] * added
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

    @property
    def running(self) -> bool:
        """Whether a backward has begun and not ended."""
        return bool(self._tasks)

    def expects(self, index: int) -> bool:
        """Whether gradients of a group may come."""
        return bool(self.awaiting[index])

    def restart(self) -> None:
        """A pass begins: nothing is left of the last one."""
        self.forget_interrupted()
        self._executor.pins.clear_soft()
        self._open_calls = [0] * len(self._open_calls)
        self._open.clear()
        self.with_graph.clear()
        self.tiles.restart()

    def ended_unseen(self) -> bool:
        """Whether a backward has ended with an exception that no hook of ours saw. For the thread that watches."""
        tasks = GraphTasks(self._tasks)
        return bool(tasks) and not tasks.run and tasks.keys() <= self._tasks.keys()  # in this order: its tasks go first

    def forget_interrupted(self) -> None:
        """Nothing tells of a backward that ended with an exception."""
        if self._tasks and torch._C._current_graph_task_id() == -1:
            self.failed("its backward ended with an exception")
            self._executor.agreement.rejoin()
            self._end()
            self.with_graph.clear()

    def failed(self, error: BaseException | str) -> None:
        """A gradient could not be taken: the other ranks are told."""
        self._executor.agreement.fail(error, spoilt=True)

    def note(self) -> None:
        """A call inside a backward: a checkpoint recomputes."""
        self._note_task()

    @interrupts.defers
    def begin(self) -> None:
        """A backward has come to the model."""
        self._note_task()

    # -- what backward reads ------------------------------------------------------------------------------------------

    def begins(self, call: Call) -> None:
        """The gradient of a call's output is known: its groups are read from now on."""
        task = self._note_task()
        if self._open:
            self._close(task, node_number())
        if call.task != task:  # a graph may be used by several backwards
            call.task = task
            for index, slot in call.places:
                if slot not in self.awaiting[index]:
                    self._await_again(index, slot)
            if call.frozen:
                self._open.append(call)
                for index in call.frozen:
                    self._open_calls[index] += 1
        for index in call.groups:
            self.pin(index)
        for index in call.marked:
            self._executor.mark(index)

    def _close(self, task: int, number: int) -> None:
        """A graph task has come to this node: calls that began after it read their groups no more."""
        while self._open and self._open[-1].task == task and self._open[-1].began > number:
            for index in self._open.pop().frozen:
                self._open_calls[index] -= 1
                self._unpin_if_done(index)

    def reading(self, index: int) -> None:
        """A group is about to be read that perhaps no hook has announced. See [Note: saved tensors] in runtime/saved.py."""
        task = _current_task()
        if task != -1:
            node, known = _current_node(), self._reads.get(task)
            number = -1 if node is None else node._sequence_nr()
            if known is None or known[0] != number:
                self._reads[task] = number, {index}
            else:
                known[1].add(index)
            if task not in self._tasks:  # a backward inside a call that holds the group: its end must be heard of, too
                with interrupts.deferred:
                    self._note_task()
        executor = self._executor
        pins = executor.pins
        if executor.groups[index].residence is not Residence.RESIDENT or not (index in pins.soft or pins.hard[index] > 0):
            with interrupts.deferred:
                if task != -1:
                    self._note_task()
                self.pin(index)

    def pin(self, index: int) -> None:
        """A group stays resident until its gradients are in, or to the end of the pass, for as long as there is room."""
        if transforms.inside():
            with transforms.outside():
                self._executor.pin(index)
        else:
            self._executor.pin(index)

    def _being_read(self) -> set[int]:
        """Groups that a node at work was given tensors of: the one that runs now, and those around a backward in a backward."""
        task, found = torch._C._current_graph_task_id(), set[int]()
        for reader, (number, groups) in self._reads.items():
            if reader != task or number == node_number():
                found |= groups
        return found

    def _unpin_if_done(self, index: int) -> None:
        if not self.awaiting[index] and self._open_calls[index] == 0:
            self._executor.pins.give_up(index)

    # -- gradients ----------------------------------------------------------------------------------------------------

    def arrived(self, param: nn.Parameter) -> None:
        """Autograd has finished a parameter's gradient."""
        grad = self._take_grad(param)
        if grad is None:
            return
        if _current_task() not in self._tasks:
            self._note_task()
        self.arrivals += 1
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
                    self._await_again(index, slot)
                if slot in awaited:
                    awaited.remove(slot)
                    if not awaited:
                        if self.sync:
                            executor.reduce(index)
                        self._unpin_if_done(index)
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
        index, slot = self.noting[id(param)]
        gradient, awaited = self._gradients[index], self.awaiting[index]
        own = gradient.own
        if (
            len(awaited) < 2
            or slot not in awaited
            or slot in own.arrived
            or own.flat is None
            or gradient.phase is not Phase.IDLE
            or gradient.passes
            or gradient.used
            or self._shown.any_shown
            or gradient.group.params[slot] is not param
            or _current_task() not in self._tasks
            or _is_grad_enabled()
        ):
            return False
        with _NotAsked():  # parameters may be of a class that asks
            grad = param.grad
            if type(grad) is not _TENSOR or grad.is_sparse or grad.shape != gradient.group.layout.slots[slot].shape:
                return False
            param.grad = None
        own.waiting.append((slot, grad))
        own.arrived.add(slot)
        awaited.remove(slot)
        self.arrivals += 1
        return True

    def _notable(self, index: int) -> dict[int, Place]:
        group = self._executor.groups[index]
        pairs = enumerate(zip(group.params, group.layout.slots, strict=True))
        found = {id(param): Place(index, at) for at, (param, slot) in pairs if slot.whole and slot.numel}
        self._to_note[index] = found
        return found

    def _make_room(self, index: int, gradient: Gradient) -> None:
        executor = self._executor
        if not executor.fits_all and not executor.fits(nbytes := gradient.flat_bytes):
            executor.make_room_before(nbytes, keep=index)
            advice = AGAIN_ADVICE if gradient.sum_growth_bytes(gradient.present) else ""
            executor.make_room(gradient.flat_bytes, f"gradients of {gradient.group.name}", keep=index, advice=advice)

    def _await_again(self, index: int, slot: int) -> None:
        """Several forwards came first, and what the backwards before this one brought comes again."""
        gradient = self._gradients[index]
        self.awaiting[index] |= (gradient.present | gradient.pending) - gradient.arrived
        self.awaiting[index].add(slot)

    def take_tile(self, param: nn.Parameter, place: Place, use: int, write: Write) -> None:
        """A part of a tile's gradient is known: ``write`` puts it into its place."""
        self._note_task()
        self.tiles.take(param, place, use, write, self.sync)
        self._hand_out()

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
            self._keep_local(index)

    def _keep_local(self, index: int) -> None:
        """``no_sync`` keeps whole gradients on every rank. Where they do not fit they are summed early: the same result."""
        gradient = self._gradients[index]
        if self._executor.has_room(gradient.local_bytes):
            self._executor.make_room(gradient.local_bytes, f"gradients of {gradient.group.name}", keep=index)
            gradient.keep_local()
        else:
            self._executor.reduce(index)

    # -- its end ------------------------------------------------------------------------------------------------------

    def _note_task(self) -> int:
        number = torch._C._current_graph_task_id()
        if number not in self._tasks:
            task, tasks = GraphTask(number, self._task_done), self._tasks
            if tasks and tasks.forget_ended():
                self.failed("its backward ended with an exception")
            if not tasks:
                self._turn.begin("backward", lambda: task.runs or tasks.run, backward=True)
                self._shown.beginning()
                self._check_sums()
            tasks[number] = task
        return number

    def _check_sums(self) -> None:
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

    @interrupts.defers
    def _task_done(self, task: int) -> None:
        self._tasks.pop(task, None)
        self._reads.pop(task, None)
        self._close(task, -1)
        if not self._tasks:  # a reentrant checkpoint runs a backward inside the backward
            self.tiles.end(self.sync)
            self._end()
            close_all(self._executor.groups)
            with transforms.outside():
                self._executor.end_backward(self.sync)
            self._hand_out()
            self._turn.end()

    def _end(self) -> None:
        self._executor.lane.leave()
        self._tasks.clear()
        self._reads.clear()
        self._open.clear()
        self.tiles.forget()
        self._executor.pins.clear_soft()
        for index, gradient in enumerate(self._gradients):
            self.awaiting[index].clear()
            self._open_calls[index] = 0
            if self.sync and gradient.pending:
                self._executor.reduce(index)
            elif gradient.arrived:
                self._keep_local(index)
        self.noting.clear()
        self._executor.end_pieces()
