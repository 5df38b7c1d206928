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
"""

from collections.abc import Callable

import torch
from torch import nn

from unwall.native import interrupts
from unwall.runtime import transforms
from unwall.runtime.arrivals import Arrivals, ShownGrads
from unwall.runtime.calls import Call
from unwall.runtime.graph_task import GraphTask, GraphTasks, node_number
from unwall.runtime.home_stream import HomeStream, at_home
from unwall.runtime.places import Place, Places
from unwall.runtime.tile_gradients import TileGradients, Write
from unwall.runtime.turns import Turn
from unwall.schedule.executor import Executor
from unwall.shards.gradient import Gradient
from unwall.shards.group import Group, Residence, close_all
from unwall.tiers.ledger import Ledger

_current_task, _current_node = torch._C._current_graph_task_id, torch._C._current_autograd_node


class Backward:
    """Pins what backward reads until its gradients are in, and says when a backward begins and ends. See [Note: pins]. The
    arguments: see ``Arrivals``.
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
        home_stream: HomeStream,
    ) -> None:
        self.home_stream = home_stream
        self._executor = executor
        self._gradients = executor.gradients
        self._shown = shown
        self._hand_out = hand_out
        self._turn = turn
        self._tasks = GraphTasks()
        self.arrivals = Arrivals(
            executor,
            places,
            shown,
            host,
            passes,
            arriving,
            hand_out,
            self._tasks,
            self._note_task,
            self._unpin_if_done,
            home_stream,
        )
        self.awaiting, self.hooked = self.arrivals.awaiting, self.arrivals.hooked
        self.expect, self.failed = self.arrivals.expect, self.arrivals.failed
        self.tiles = TileGradients(executor, places, arriving, self.awaiting)
        self._open_calls = [0] * len(executor.groups)
        self._open: list[Call] = []
        """Calls with frozen parameters whose backward has begun, the innermost last. See [Note: numbers of nodes]."""
        self._reads: dict[int, tuple[int, set[int]]] = {}
        """By graph task: the node that reads now, or read last, by its number, and the groups it was given tensors of."""
        executor.pins.being_read = self._being_read

    # -- what forward announces ---------------------------------------------------------------------------------------

    def grown(self) -> None:
        """Groups were added."""
        self.arrivals.grown()
        self._open_calls += [0] * (len(self.awaiting) - len(self._open_calls))

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
        self.arrivals.with_graph.clear()
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
            self.arrivals.with_graph.clear()

    def note(self) -> None:
        """A call inside a backward: a checkpoint recomputes."""
        self._note_task()

    @interrupts.defers
    def begin(self) -> None:
        """A backward has come to the model."""
        self._note_task()

    # -- what backward reads ------------------------------------------------------------------------------------------

    @at_home
    def begins(self, call: Call) -> None:
        """The gradient of a call's output is known: its groups are read from now on."""
        task = self._note_task()
        if self._open:
            self._close(task, node_number())
        if call.task != task:  # a graph may be used by several backwards
            call.task = task
            for index, slot in call.places:
                if slot not in self.awaiting[index]:
                    self.arrivals.await_again(index, slot)
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

    @at_home
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

    @at_home
    def take_tile(self, param: nn.Parameter, place: Place, use: int, write: Write) -> None:
        """A part of a tile's gradient is known: ``write`` puts it into its place."""
        self._note_task()
        self.tiles.take(param, place, use, write, self.arrivals.sync)
        self._hand_out()

    # -- its end ------------------------------------------------------------------------------------------------------

    def _note_task(self) -> int:
        number = torch._C._current_graph_task_id()
        if number not in self._tasks:
            task, tasks = GraphTask(number, self._task_done), self._tasks
            if tasks and tasks.forget_ended():
                self.failed("its backward ended with an exception")
            if not tasks:
                self.arrivals.noting.clear()  # of a backward that failed
                self._turn.begin("backward", lambda: task.runs or tasks.run, backward=True)
                self._shown.beginning()
                self.arrivals.check_sums()
            tasks[number] = task
        return number

    @interrupts.defers
    @at_home
    def _task_done(self, task: int) -> None:
        self._tasks.pop(task, None)
        self._reads.pop(task, None)
        self._close(task, -1)
        if not self._tasks:  # a reentrant checkpoint runs a backward inside the backward
            self.tiles.end(self.arrivals.sync)
            self._end()
            close_all(self._executor.groups)
            with transforms.outside():
                self._executor.end_backward(self.arrivals.sync)
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
            if self.arrivals.sync and gradient.pending:
                self._executor.reduce(index)
            elif gradient.arrived:
                self.arrivals.keep_local(index)
        self.arrivals.noting.clear()
        self._executor.end_pieces()
