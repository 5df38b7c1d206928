"""A sharded model at work: follows the calls of its modules and autograd's progress, and tells the executor.

[Note: pins]
Forward: a group is pinned while a call that reads it is on the stack. Backward: from the moment the gradient of such a call's
output is known until every gradient that is awaited from the group has arrived and, for frozen parameters, the call's input
gradients are out. A node that reads a parameter also produces that parameter's gradient, so "all gradients in" means "read no
more". What cannot be followed (an output in an unknown wrapper, a gradient that never comes) stays pinned to the end of the
pass: memory, never a wrong value.
"""

import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from unwall.native.library import DiskError
from unwall.plan import Plan
from unwall.runtime.boundary import boundary_nodes
from unwall.runtime.calls import Call, Frame
from unwall.runtime.outputs import tensors_in
from unwall.runtime.saved import SavedTensors
from unwall.schedule.executor import Executor
from unwall.shards.collectives import Ranks
from unwall.shards.gradients import Gradient
from unwall.shards.group import Group, Residence
from unwall.tiers.ledger import BudgetError
from unwall.tiers.meter import LinkMeter
from unwall.tiers.tiers import Tiers

discarded: "deque[Callable[[], None]]" = deque()
"""What is left of optimizers that are gone. Their finalisers may run on any thread, under any lock: they only add to this."""


def free_discarded() -> None:
    """Frees it, where waiting and locking is allowed: on a thread that calls unwall. What cannot be freed yet adds itself."""
    for _ in range(len(discarded)):
        discarded.popleft()()


@dataclass
class Speculated:
    """How updates that ran ahead of their step ended."""

    committed: int = 0
    missed: int = 0


class Engine:
    """Everything unwall knows about one sharded model."""

    def __init__(
        self, model: nn.Module, plan: Plan, groups: list[Group], gradients: list[Gradient], tiers: Tiers, ranks: Ranks
    ) -> None:
        self.plan = plan
        self.groups = groups
        self.gradients = gradients
        self.tiers = tiers
        self.device = tiers.device
        self.ranks = ranks
        ranks.meter = LinkMeter("collective", tiers.links.timeline)
        self.executor = Executor(groups, gradients, tiers, ranks)
        self.places = {id(param): (group.index, slot) for group in groups for slot, param in enumerate(group.params)}
        self.names = {id(module): name for name, module in model.named_modules()}
        self.sync = True
        self.version = 0
        """Counts changes of the parameters' values."""
        self.lent: set[int] = set()
        """Parameters (by id) that are whole and the user's now, inside ``full_params``."""
        self.loading: set[int] = set()
        """Parameters (by id) that ``load_state_dict`` is writing."""
        self._frames: list[Frame] = []
        self._awaiting: list[set[int]] = [set() for _ in groups]
        self._open_calls = [0] * len(groups)
        self._backward_pins: set[int] = set()
        self._tasks: set[int] = set()
        self._hooked: set[int] = set()
        self._saved = SavedTensors(groups, self._unpacking)
        self.loss_scale = 1.0
        """What the loss of the gradients held now was multiplied with."""
        self.speculation = Speculated()
        self.steps = 0
        """Optimizer steps since the statistics were reset."""
        self.listeners: list[weakref.WeakMethod[Callable[[Engine, int], None]]] = []
        """Told of each gradient that has landed, during backward."""
        self.guards: list[weakref.WeakMethod[Callable[[Engine, int], None]]] = []
        """Told of each gradient that arrives. They may refuse it."""
        self.executor.on_landed = self._landed
        self.on_gradient: Callable[[torch.Tensor], None] = lambda _: None

    def listen(self, landed: "Callable[[Engine, int], None]", guard: "Callable[[Engine, int], None] | None") -> None:
        """Tells an optimizer of gradients for as long as it lives."""
        for methods, method in ((self.listeners, landed), (self.guards, guard)):
            methods[:] = [known for known in methods if known() is not None]
            if method is not None:
                methods.append(weakref.WeakMethod(method))

    # -- forward ------------------------------------------------------------------------------------------------------

    def enter(self, module: nn.Module, groups: tuple[int, ...], reads: tuple[nn.Parameter, ...]) -> None:
        """A module's forward begins. ``reads``: parameters it reads in ways that ``touched`` does not see."""
        if not self._frames and torch._C._current_graph_task_id() == -1:
            self._begin_pass()
            self._saved.watch()  # not in a recomputation: its saved tensors are the checkpoint's
        frame = Frame(module)
        self._frames.append(frame)
        for index in groups:
            self._read(frame, index)
        for param in reads:
            self.touched(param)

    def touched(self, param: nn.Parameter) -> None:
        """A parameter is looked up on its module: someone in the innermost running call is about to read it."""
        index, slot = self.places[id(param)]
        frame = self._frames[-1]
        if index not in frame.groups:
            self._read(frame, index)
        if param.requires_grad and torch.is_grad_enabled():
            self._awaiting[index].add(slot)
            frame.slots.add((index, slot))
            if id(param) not in self._hooked:  # frozen when the model was sharded, trained now
                self.hook_gradient(param)

    def hook_gradient(self, param: nn.Parameter) -> None:
        """From now on the engine takes this parameter's gradient (torch allows the hook on trainable parameters only)."""
        if param.requires_grad and id(param) not in self._hooked:
            param.register_post_accumulate_grad_hook(self.on_gradient)
            self._hooked.add(id(param))

    @property
    def running(self) -> bool:
        return bool(self._frames)

    def leave(self, module: nn.Module, inputs: Any, output: Any) -> None:
        """A module's forward ends, well or with an exception (``output`` is None then)."""
        while self._frames:
            frame = self._frames.pop()
            if frame.groups and output is not None and frame.module is module and torch.is_grad_enabled():
                self._watch_backward(frame, inputs, output)
            self._hand_up(frame, output)
            for index in frame.groups:
                self.executor.release(index)
            if not self._frames:
                self._saved.unwatch()
            if frame.module is module:
                break
        if not self._frames and not torch.is_grad_enabled():
            self.executor.lane.leave()
        if not self._frames and self.ranks.size > 1 and torch._C._current_graph_task_id() == -1:
            self.executor.end_forward(torch.is_grad_enabled(), self.sync)

    def _hand_up(self, frame: Frame, output: Any) -> None:
        """A call may return a view of a parameter: then whoever called it reads the group, too."""
        if not self._saved.streams or not frame.groups or output is None:
            return
        for tensor in tensors_in(output):
            index = self._saved.group_of(tensor)
            if index is None:
                continue
            if not self._frames:
                self._pin_for_backward(index)
            elif index not in self._frames[-1].groups:
                self._read(self._frames[-1], index)

    def _unpacking(self, index: int) -> None:
        """Backward is about to read a group that no hook has announced. See [Note: saved tensors] in runtime/saved.py."""
        if self.groups[index].residence is not Residence.RESIDENT or not self.executor.is_pinned(index):
            self._pin_for_backward(index)
            if torch._C._current_graph_task_id() != -1:
                self._note_task()

    def _begin_pass(self) -> None:
        if self._tasks:  # the last backward ended with an exception
            self._end_backward()
        self._backward_pins.clear()
        self._open_calls = [0] * len(self.groups)
        self.executor.agreement.begin_pass(torch.is_grad_enabled())
        free_discarded()
        if self.lent:
            raise RuntimeError("the model cannot run inside unwall.full_params: leave the context first")
        self.executor.unpin_all()
        self.executor.trace.begin(torch.is_grad_enabled())

    def _read(self, frame: Frame, index: int) -> None:
        self.executor.use(index)
        frame.groups.append(index)

    def _watch_backward(self, frame: Frame, inputs: Any, output: Any) -> None:
        tensors = [tensor for tensor in tensors_in(output) if tensor.grad_fn is not None]
        groups = tuple(frame.groups)
        if not tensors:
            if any(self._awaiting[index] for index in groups):
                for index in groups:  # see [Note: pins]
                    self._pin_for_backward(index)
            return
        frozen = [index for index in groups if any(not param.requires_grad for param in self.groups[index].params)]
        call = Call(groups, tuple(frozen), frame.slots)
        if frozen:
            nodes = boundary_nodes(tensors, tensors_in(inputs))
            call.open_nodes = -1 if nodes is None else len(nodes)
            for node in nodes or ():
                node.register_hook(lambda *_, call=call: self._node_done(call))
        for tensor in tensors:
            tensor.register_hook(lambda _, call=call: self._backward_begins(call))

    # -- backward -----------------------------------------------------------------------------------------------------

    def _backward_begins(self, call: Call) -> None:
        task = self._note_task()
        if call.task != task:  # a graph may be used by several backwards
            call.task = task
            for index, slot in call.slots:
                self._awaiting[index].add(slot)
        for index in call.groups:
            self._pin_for_backward(index)
        if not call.started:
            call.started = True
            if call.open_nodes:
                for index in call.frozen:
                    self._open_calls[index] += 1

    def _node_done(self, call: Call) -> None:
        call.open_nodes -= 1
        if call.open_nodes == 0 and call.started:
            for index in call.frozen:
                self._open_calls[index] -= 1
                self._unpin_if_done(index)

    def arrived(self, param: nn.Parameter) -> None:
        """Autograd has finished a parameter's gradient."""
        grad, param.grad = param.grad, None
        if grad is None:
            return
        self._note_task()
        index, slot = self.places[id(param)]
        if self.guards:
            self._tell(self.guards, index)
        gradient = self.gradients[index]
        self._room_for_gradient(gradient)
        with torch.no_grad():
            gradient.take(slot, grad.to_dense() if grad.is_sparse else grad)
        awaited = self._awaiting[index]
        was_last = awaited == {slot}
        awaited.discard(slot)
        if was_last:
            if self.sync:
                self.executor.reduce(index)
            self._unpin_if_done(index)

    def _landed(self, index: int) -> None:
        self._tell(self.listeners, index)

    def _tell(self, methods: "list[weakref.WeakMethod[Callable[[Engine, int], None]]]", index: int) -> None:
        for method in methods:
            call = method()
            if call is not None:
                call(self, index)

    def _room_for_gradient(self, gradient: Gradient) -> None:
        label = f"gradients of {gradient.group.name}"
        try:
            self.executor.make_room(gradient.flat_bytes, label)
        except BudgetError:
            if self.sync:
                raise
            # no_sync keeps whole gradients on every rank. Where they do not fit, sum them early: slower, the same result.
            for index, local in enumerate(self.gradients):
                if local.pending:
                    self.executor.reduce(index)
            self.executor.finish_reduces()
            self.executor.make_room(gradient.flat_bytes, label)

    def _pin_for_backward(self, index: int) -> None:
        if index in self._backward_pins:
            self.executor.trace.record(index)
            return
        self.executor.use(index)
        self._backward_pins.add(index)

    def _unpin_if_done(self, index: int) -> None:
        if index in self._backward_pins and not self._awaiting[index] and self._open_calls[index] == 0:
            self._backward_pins.discard(index)
            self.executor.release(index)

    def _note_task(self) -> int:
        task = torch._C._current_graph_task_id()
        if task not in self._tasks:
            self._tasks.add(task)
            torch.autograd.Variable._execution_engine.queue_callback(lambda: self._task_done(task))
        return task

    def _task_done(self, task: int) -> None:
        self._tasks.discard(task)
        if not self._tasks:  # a reentrant checkpoint runs a backward inside the backward
            self._end_backward()
            self.executor.end_backward(self.sync)

    def _end_backward(self) -> None:
        self.executor.lane.leave()
        self._tasks.clear()
        for index in sorted(self._backward_pins):
            self.executor.release(index)
        self._backward_pins.clear()
        for index, gradient in enumerate(self.gradients):
            self._awaiting[index].clear()
            self._open_calls[index] = 0
            if self.sync and gradient.pending:
                self.executor.reduce(index)
            elif gradient.arrived:
                self._keep_local(index)

    def _keep_local(self, index: int) -> None:
        gradient = self.gradients[index]
        try:
            self.executor.make_room(gradient.local_bytes, f"gradients of {gradient.group.name}")
            gradient.keep_local()
        except BudgetError:
            self.executor.reduce(index)

    # -- the rest of the world ----------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Gradients in flight have been reduced."""
        self.executor.finish_reduces(notify=False, departed=False)

    def flush(self) -> None:
        """What ``no_sync`` left on this rank is reduced, too. All ranks call it together."""
        for index, gradient in enumerate(self.gradients):
            if gradient.pending:
                self.executor.reduce(index)
        self.executor.end_step()
        self.settle()

    def finish(self) -> None:
        """Everything in flight has ended, updates too."""
        free_discarded()
        self.settle()
        self.groups[0].staging.close()
        for group in self.groups:
            group.finish_update()

    def zero_grad(self, set_to_none: bool = True) -> None:  # noqa: ARG002 (torch's signature)
        """Forgets every gradient of the model."""
        for index in range(len(self.groups)):
            self._tell(self.guards, index)
        for gradient in self.gradients:
            gradient.clear()
        self.loss_scale = 1.0

    def discard_gradients(self, index: int, slots: set[int]) -> None:
        """Forgets the gradients of some of a group's parameters."""
        gradient = self.gradients[index]
        with suppress(DiskError):  # it is not wanted any more
            gradient.finish_reduce()
        gradient.present -= slots
        gradient.drop_pending(slots)
        if not gradient.present and not gradient.pending:
            gradient.clear()
            if not any(other.present or other.pending for other in self.gradients):
                self.loss_scale = 1.0
        else:
            gradient.forget(slots)

    @contextmanager
    def without_sync(self) -> Iterator[None]:
        """Gradients stay on this rank and add up there."""
        before, self.sync = self.sync, self.ranks.size == 1
        try:
            yield
        finally:
            self.sync = before
