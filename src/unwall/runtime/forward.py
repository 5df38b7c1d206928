"""The calls of a sharded model's modules: which groups they read, and what their backward will need."""

import os
import sys
from collections.abc import Callable
from threading import current_thread, get_ident
from types import FrameType
from typing import Any

import torch
from torch import nn

from unwall.native import interrupts
from unwall.runtime import transforms
from unwall.runtime.backward import Backward
from unwall.runtime.boundary import boundary_nodes
from unwall.runtime.calls import Call, Frame, is_running
from unwall.runtime.outputs import tensors_in
from unwall.runtime.places import Places
from unwall.runtime.saved import SavedTensors
from unwall.runtime.turns import Turn, calls_a_module
from unwall.schedule.executor import Executor
from unwall.shards.collectives import Ranks
from unwall.shards.gradient import Gradient
from unwall.shards.group import Group, close_all


class Forward:
    """Follows the calls on the stack and pins what they read. See [Note: pins] in runtime/backward.py.

    ``beginning`` is called when a pass begins, and may refuse it.
    """

    def __init__(
        self,
        executor: Executor[Group, Gradient],
        ranks: Ranks,
        places: Places,
        backward: Backward,
        beginning: Callable[[], None],
        turn: Turn,
    ) -> None:
        self.saved = SavedTensors(executor.groups, backward.reading)
        self._executor = executor
        self._ranks = ranks
        self._places = places
        self._backward = backward
        self._beginning = beginning
        self._turn = turn
        self._frames: list[Frame] = []
        self._handled = 0  # id of the exception in whose handler the outermost call was made
        self._thread = 0
        """Whose calls they are."""
        self.long: int | None = None
        """Inside ``Engine.one_pass``: how many forwards there were. They are one pass to the trace."""

    @property
    def running(self) -> bool:
        """Whether a parameter that is looked up now may be read for the model: a call is on the stack, or a checkpoint
        recomputes something of a call that has ended."""
        return bool(self._frames) or torch._C._current_graph_task_id() != -1

    @property
    def on_stack(self) -> bool:
        """Whether a call has begun and nobody has said that it has ended."""
        return bool(self._frames)

    def enter(self, module: nn.Module, groups: tuple[int, ...], reads: tuple[nn.Parameter, ...]) -> None:
        """A module's forward begins. ``reads``: parameters it reads in ways that ``touched`` does not see."""
        if self._frames:
            if self._thread != get_ident() and torch._C._current_graph_task_id() == -1:
                self.forget_interrupted()
                self._turn.begin("a forward", _caller())  # returns when theirs are over
                self._frames.clear()
            elif module is self._frames[0].module:
                self.forget_interrupted()
        pair = caller = None
        if self._frames:
            if self.saved.watching:
                self.saved.cover()
        else:
            caller = _caller()
            if torch._C._current_graph_task_id() == -1:
                if not self._turn.is_mine(caller):
                    self._turn.begin("a forward", caller)
                with transforms.outside():
                    self._begin_pass()
            else:  # a checkpoint's recomputation
                self._backward.note()
            self._thread, self._handled = get_ident(), id(sys.exception())
            pair = self.saved.watch()
        frame = Frame(module, pair, caller)
        self._frames.append(frame)
        for index in groups:
            self._read(frame, index)
        for param in reads:
            self.touched(param)

    def forget_interrupted(self) -> None:
        """Nothing tells of a call that ended with an interrupt (torch calls no hooks then): its frames are stale."""
        mine = self._thread == get_ident() and not is_running(self._frames[0].caller) if self._frames else False
        if mine or (self._frames and self._thread == _OVERLOOKED):
            pair = self._frames[0].saved
            self._frames.clear()
            close_all(self._executor.groups)
            self._executor.agreement.fail("its forward was interrupted")
            if pair is not None:
                self.saved.unwatch(pair)

    def ended_unseen(self) -> bool:
        """Whether a forward has ended with an interrupt. For the thread that watches. From then on whoever uses the model finds
        out first thing, at no cost: the calls are nobody's."""
        thread = self._thread
        if not self._frames or calls_a_module(thread):
            return self._thread == _OVERLOOKED
        self._thread = _OVERLOOKED
        if calls_a_module(thread):  # it has just come back, and may not have seen that
            self._thread = thread
        return self._thread == _OVERLOOKED

    def touched(self, param: nn.Parameter) -> None:
        """A parameter is looked up on its module: someone in the innermost running call is about to read it."""
        if self.saved.watching:
            self.saved.cover()
        frame = self._frames[-1] if self._frames else None
        if frame is not None and self._thread != get_ident() and torch._C._current_graph_task_id() == -1:
            if self._thread == _OVERLOOKED:
                self.forget_interrupted()
                return
            raise RuntimeError(
                f"a parameter of {type(frame.module).__name__} or of a module near it is read by thread "
                f"{current_thread().name!r} while {self._turn.name()} runs the model: read it there, or take a state_dict()"
            )
        places = self._places[id(param)]
        if len(places) > 1:
            return  # it is never whole on the device: the operator that reads it fetches its tiles (runtime/tiling.py)
        for place in places:
            if frame is None:
                self._backward.reading(place.group)
                self._executor.groups[place.group].faces.open()
            elif place.group not in frame.groups:
                self._read(frame, place.group)
        if param.requires_grad and torch.is_grad_enabled():
            self._backward.expect(param, places)
            if frame is not None:
                frame.places.update(places)

    def leave(self, module: nn.Module, inputs: Any, output: Any) -> None:
        """A module's forward ends, well or with an exception (``output`` is None then)."""
        in_backward = torch._C._current_graph_task_id() != -1
        if not in_backward and not (self._thread == get_ident() if self._frames else self._turn.is_mine()):
            return  # it was refused
        while self._frames:
            frame = self._frames.pop()
            if frame.saved is not None:
                self.saved.unwatch(frame.saved)
            if frame.groups and output is not None and frame.module is module and torch.is_grad_enabled():
                self._watch_backward(frame, inputs, output)
            self._hand_up(frame, output)
            for index in frame.groups:
                self._executor.release(index)
            if frame.module is module:
                break
        if not self._frames and torch._C._current_graph_task_id() == -1:
            close_all(self._executor.groups)
        if not self._frames and not torch.is_grad_enabled():
            self._executor.lane.leave()
        if not self._frames and not in_backward:
            if self._ranks.size > 1:
                with transforms.outside():
                    self._meet_at_end(sys.exception() if output is None else None)
            self._turn.end()

    def _meet_at_end(self, error: BaseException | None) -> None:
        """The outermost call ends: the ranks agree on what follows, or are told of this rank's error."""
        if error is not None and id(error) != self._handled:
            self._executor.agreement.fail(error)
        else:
            self._executor.end_forward(torch.is_grad_enabled(), self._backward.sync)

    def _begin_pass(self) -> None:
        interrupts.install()  # where someone has put another handler there since
        self._backward.restart()
        self._executor.agreement.begin_pass(torch.is_grad_enabled())
        self._beginning()
        if self.long is None:
            self._executor.begin_pass(torch.is_grad_enabled())
            return
        if self.long == 0:
            self._executor.begin_pass("a schedule")
        self.long += 1

    def _read(self, frame: Frame, index: int) -> None:
        with interrupts.deferred:
            with transforms.outside():
                self._executor.use(index)
            self._executor.groups[index].faces.open()
            frame.groups.append(index)

    def _hand_up(self, frame: Frame, output: Any) -> None:
        """A call may return a view of a parameter: then whoever called it reads the group, too."""
        if not self.saved.streams or not frame.groups or output is None:
            return
        for tensor in tensors_in(output):
            index = self.saved.group_of(tensor)
            if index is None:
                continue
            if not self._frames:
                self._backward.pin(index)
            elif index not in self._frames[-1].groups:
                self._read(self._frames[-1], index)

    def _watch_backward(self, frame: Frame, inputs: Any, output: Any) -> None:
        backward = self._backward
        tensors = [tensor for tensor in tensors_in(output) if tensor.grad_fn is not None]
        groups = tuple(frame.groups)
        if not tensors:
            if any(backward.expects(index) for index in groups):
                for index in groups:  # it cannot be followed
                    backward.pin(index)
            return
        frozen = [index for index in groups if any(not param.requires_grad for param in self._executor.groups[index].params)]
        call = Call(groups, tuple(frozen), frame.places)
        if frozen:
            nodes = boundary_nodes(tensors, tensors_in(inputs))
            call.open_nodes = -1 if nodes is None else len(nodes)
            for node in nodes or ():
                node.register_hook(lambda *_, call=call: _deferred(backward.node_done, call))
        for tensor in tensors:
            tensor.register_hook(lambda _, call=call: _deferred(backward.begins, call))


def _deferred(tell: Callable[[Call], None], call: Call) -> None:
    with interrupts.deferred:
        tell(call)


def _caller() -> FrameType:
    """The call of the hook that called ``enter``. Of a compiled module's hook dynamo has a frame in between."""
    found = sys._getframe(3)
    while found.f_back is not None and found.f_code.co_filename.endswith(_DYNAMO):
        found = found.f_back
    return found


_OVERLOOKED = -1
"""Whose calls they are that ended with an interrupt, once the thread that watches has seen it."""
_DYNAMO = os.path.join("_dynamo", "eval_frame.py")
