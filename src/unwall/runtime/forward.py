"""The calls of a sharded model's modules: which groups they read, and what their backward will need.

[Note: quiet passes]
Hooks sit on every module, because each may be the one that the user calls, and the outermost call begins and ends a pass. For
the calls inside it there is something to do only where groups come and go, where ranks agree on collectives, where saved
tensors go through layers of ours, or where a time line wants to know. Otherwise the pass is *quiet*: all groups are opened when
it begins, and the hooks inside return at once. A lookup of a trainable parameter still says that its gradient is awaited.
"""

import sys
import weakref
from collections.abc import Callable
from threading import current_thread, get_ident
from types import FrameType
from typing import Any

import torch
from torch import nn

from unwall.native import interrupts
from unwall.runtime import transforms
from unwall.runtime.backward import Backward
from unwall.runtime.calls import Call, Frame, caller_of_hook, is_running
from unwall.runtime.covered import Covered
from unwall.runtime.follow import follow
from unwall.runtime.home_stream import at_home
from unwall.runtime.outputs import tensors_in
from unwall.runtime.places import Place, Places
from unwall.runtime.saved import SavedTensors
from unwall.runtime.turns import Turn, is_executed
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
        self.home_stream = backward.home_stream
        self.frames: list[Frame] = []
        """The calls on the stack."""
        self._handled = 0  # id of the exception in whose handler the outermost call was made
        self.thread = 0
        """Whose calls they are."""
        self.quiet = False
        """Every group stays, and nothing is saved for autograd in a way of ours: calls inside the outermost one mean nothing.
        See [Note: quiet passes]."""
        self.outermost: nn.Module | None = None
        """The module whose call begins the pass."""
        self.lookups = 0
        """Parameters that quiet passes have looked up, ever."""
        self.covered = Covered()
        """See [Note: covered calls] in runtime/covered.py."""
        self._frozen: dict[int, bool] = {}
        """Whether a group has frozen parameters, as far as this pass has asked."""
        self.long: int | None = None
        """Inside ``Engine.one_pass``: how many forwards there were. They are one pass to the trace."""

    @property
    def running(self) -> bool:
        """Whether a parameter that is looked up now may be read for the model: a call is on the stack, or a checkpoint
        recomputes something of a call that has ended."""
        return bool(self.frames) or torch._C._current_graph_task_id() != -1

    @property
    def on_stack(self) -> bool:
        """Whether a call has begun and nobody has said that it has ended."""
        return bool(self.frames)

    def enter(
        self, module: nn.Module, groups: tuple[int, ...], reads: tuple[nn.Parameter, ...], cover: tuple[int, ...] = ()
    ) -> None:
        """A module's forward begins. ``reads``: parameters it reads in ways that ``touched`` does not see. ``cover``: the
        groups of all that is below it, where it may cover that."""
        outermost = not self.frames or self._is_first(module)
        caller = caller_of_hook() if outermost or self._ranks.size > 1 else None
        pair = None
        if outermost:
            self._begin(caller)
            self.outermost = module
            pair = self.saved.watch()
        elif self.saved.watching:
            self.saved.cover()
        frame = Frame(module, pair, caller)
        if pair is not None:
            pair.call = weakref.ref(frame)
        self.frames.append(frame)
        for index in groups:
            self._read(frame, index)
        for param in reads:
            self.touched(param, self._places[id(param)])
        if outermost:
            self.quiet = self._executor.all_stay and self.saved.idle and not self._executor.lane.watching
            if self.quiet:
                self._open_all()
        if cover and not self.quiet and self._ranks.size == 1 and torch._C._current_graph_task_id() == -1:
            self._cover(frame, cover)

    def _is_first(self, module: nn.Module) -> bool:
        """Whether a call is the outermost one although there are others: those of another thread, which it waits for, or of one
        of this thread's that ended with an interrupt."""
        if self.thread != get_ident():
            return torch._C._current_graph_task_id() == -1
        for first in self.frames:
            return module is first.module and not is_running(first.caller)
        return True  # another thread has just found out

    def _begin(self, caller: FrameType | None) -> None:
        """The outermost call begins. Nothing is changed before it is this thread's turn: others may run the model before."""
        if torch._C._current_graph_task_id() == -1:
            if not self._turn.is_mine(caller):
                self._turn.begin("a forward", caller)
            self.home_stream.settle()
            self._forget_calls()
            with transforms.outside():
                self._begin_pass()
        else:  # a checkpoint's recomputation
            self._forget_calls()
            self._backward.note()
        self.thread, self._handled = get_ident(), id(sys.exception())

    def _cover(self, frame: Frame, groups: tuple[int, ...]) -> None:
        if self.covered.may_begin(frame, self.frames, groups):
            for index in [index for index in groups if index not in frame.groups]:
                self._read(frame, index)
            self.covered.begin(frame, groups)

    def _open_all(self) -> None:
        for index, group in enumerate(self._executor.groups):
            self._executor.use_staying(index)
            group.faces.open()

    def forget_interrupted(self) -> None:
        """Nothing tells of a call that ended with an interrupt (torch calls no hooks then): its frames are stale."""
        mine = self.thread == get_ident() and not is_running(self.frames[0].caller) if self.frames else False
        if mine or (self.frames and self.thread == _OVERLOOKED):
            self._forget_calls()

    def _forget_calls(self) -> None:
        """For whoever has the turn: calls that are still there are over."""
        self.quiet = False
        if not self.frames:
            return
        pair = self.frames[0].saved
        for frame in self.frames:
            for index in frame.groups:
                self._executor.release(index)
        self.frames.clear()
        self.covered.end()
        close_all(self._executor.groups)
        self._executor.agreement.fail("its forward was interrupted")
        if pair is not None:
            self.saved.unwatch(pair)

    def ended_unseen(self) -> bool:
        """Whether a forward has ended with an interrupt. For the thread that watches. From then on whoever uses the model finds
        out first thing, at no cost: the calls are nobody's."""
        thread, frames = self.thread, self.frames.copy()
        if not frames or any(frame.caller is not None and is_executed(frame.caller) for frame in frames):
            return bool(frames) and thread == _OVERLOOKED
        self.thread = _OVERLOOKED
        if self.frames != frames:  # it has just come back, and may not have seen that
            self.thread = thread
        return self.thread == _OVERLOOKED

    def touched(self, param: nn.Parameter, places: tuple[Place, ...]) -> None:
        """A parameter is looked up on its module: someone in the innermost running call is about to read it. ``places``: its
        own."""
        mine = self.thread == get_ident()
        if mine and self.quiet:
            self.lookups += 1
            if param.requires_grad and _is_grad_enabled():
                backward = self._backward
                if id(param) in backward.hooked:  # what ``expect`` does, without a call for each parameter; so below
                    for index, slot in places:
                        backward.awaiting[index].add(slot)
                else:
                    backward.expect(param, places)
            return
        saved = self.saved
        if (look := saved.look) is not None and (top := look(True)) is not None and top[0] is not saved.pushed:
            saved.cover()
        frame = self.frames[-1] if self.frames else None
        if mine and frame is not None and frame.covers:
            self.lookups += 1
            place = places[0]
            index, slot = place
            if index in self.covered.groups and len(places) == 1:
                if param.requires_grad and _is_grad_enabled():
                    backward = self._backward
                    if id(param) in backward.hooked:
                        backward.awaiting[index].add(slot)
                    else:
                        backward.expect(param, places)
                    frame.places.add(place)
                return
            self.covered.never_again(frame)
        if frame is not None and not mine and torch._C._current_graph_task_id() == -1:
            if self.thread == _OVERLOOKED:
                self.forget_interrupted()
                return
            raise RuntimeError(
                f"a parameter of {type(frame.module).__name__} or of a module near it is read by thread "
                f"{current_thread().name!r} while {self._turn.name()} runs the model: read it there, or take a state_dict()"
            )
        if len(places) > 1:
            return  # it is never whole on the device: the operator that reads it fetches its tiles (runtime/tiling.py)
        for place in places:
            if frame is None:
                self._backward.reading(place.group)
                self._executor.groups[place.group].faces.open()
            elif place.group not in frame.groups:
                with interrupts.deferred:
                    self._read(frame, place.group)
        if param.requires_grad and torch.is_grad_enabled():
            self._backward.expect(param, places)
            if frame is not None:
                frame.places.update(places)

    def leave(self, module: nn.Module, output: Any) -> None:
        """A module's forward ends, well or with an exception (``output`` is None then)."""
        in_backward = torch._C._current_graph_task_id() != -1
        if not in_backward and not (self.thread == get_ident() if self.frames else self._turn.is_mine()):
            return  # it was refused
        ended = False
        while self.frames and not ended:
            frame = self.frames.pop()
            ended = frame.module is module
            if frame.covers:
                self.covered.end()
            if frame.saved is not None:
                self.saved.unwatch(frame.saved)
            if frame.groups or frame.marked:
                if ended and output is not None and torch.is_grad_enabled():
                    self._watch_backward(frame, output)
                self._hand_up(frame, output)
                for index in frame.groups:
                    self._executor.release(index)
        if not self.frames:
            self._end(output, in_backward)

    def _end(self, output: Any, in_backward: bool) -> None:
        """The outermost call ends."""
        self.quiet = False
        if not torch.is_grad_enabled():
            self._executor.lane.leave()
        elif output is not None and not in_backward:
            backward = self._backward
            for tensor in tensors_in(output):
                if tensor.grad_fn is not None:  # so that a backward is known of from its beginning
                    tensor.register_hook(lambda _: backward.begin())
        if in_backward:
            return
        close_all(self._executor.groups)
        if self._ranks.size > 1:
            with transforms.outside():
                self._meet_at_end(sys.exception() if output is None else None)
        self._turn.end()

    def _meet_at_end(self, error: BaseException | None) -> None:
        """The outermost call ends: the ranks agree on what follows, or are told of this rank's error."""
        if error is not None and id(error) != self._handled:
            self._executor.agreement.fail(error)
        else:
            self._executor.end_forward(torch.is_grad_enabled(), self._backward.arrivals.sync)

    def _begin_pass(self) -> None:
        interrupts.install()  # where someone has put another handler there since
        self._backward.restart()
        self._frozen.clear()
        self._executor.agreement.begin_pass(torch.is_grad_enabled())
        self._beginning()
        if self.long is None:
            self._executor.begin_pass(torch.is_grad_enabled())
            return
        if self.long == 0:
            self._executor.begin_pass("a schedule")
        self.long += 1

    @at_home
    def _read(self, frame: Frame, index: int) -> None:
        """Inside ``deferred``."""
        executor = self._executor
        if executor.stays[index]:
            executor.use_staying(index)
            if executor.lane.watching:
                executor.mark(index)
                frame.marked.append(index)
        else:
            if transforms.inside():
                with transforms.outside():
                    executor.use(index)
            else:
                executor.use(index)
            frame.groups.append(index)
        faces = executor.groups[index].faces
        if not faces.is_open:
            faces.open()

    def _hand_up(self, frame: Frame, output: Any) -> None:
        """A call may return a view of a parameter: then whoever called it reads the group, too."""
        if not self.saved.streams or not frame.groups or output is None:
            return
        for tensor in tensors_in(output):
            index = self.saved.group_of(tensor)
            if index is None:
                continue
            if not self.frames:
                self._backward.pin(index)
            elif index not in self.frames[-1].groups:
                self._read(self.frames[-1], index)

    def _watch_backward(self, frame: Frame, output: Any) -> None:
        backward, every = self._backward, self._executor.groups
        groups = [index for index in frame.groups if every[index].evictable]
        if not groups and not self._executor.lane.watching:
            return  # what is here in forward is here in backward
        marked = [*frame.marked, *(index for index in frame.groups if not every[index].evictable)]
        tensors = [tensor for tensor in tensors_in(output) if tensor.grad_fn is not None]
        if not tensors:
            if any(backward.expects(index) for index in groups):
                for index in groups:  # it cannot be followed
                    backward.pin(index)
                self.covered.never_again(frame)
            return
        frozen = [index for index in groups if self._has_frozen(index)]
        follow(Call(groups, frozen, frame.places, marked, frame.began), backward, tensors)

    def _has_frozen(self, index: int) -> bool:
        known = self._frozen.get(index)
        if known is None:
            known = self._frozen[index] = False in [param.requires_grad for param in self._executor.groups[index].params]
        return known


_is_grad_enabled = torch.is_grad_enabled
_OVERLOOKED = -1
"""Whose calls they are that ended with an interrupt, once the thread that watches has seen it."""
