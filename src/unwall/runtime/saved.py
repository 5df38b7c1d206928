"""What autograd saves in forward, on its way back out in backward.

[Note: saved tensors]
Hooks on outputs fetch a group before its backward. Some reads come another way: a detached weight, a graph that is
differentiated twice, a tensor kept aside on the module. What autograd saved of a flat buffer is therefore unpacked through
here, and the group is made resident first. Only where groups come and go at all.

[Note: layers]
PyTorch applies only the innermost pair of default hooks. So a pair of ours takes the one it covers as its first layer: what is
saved goes through the layers in order and comes back in reverse, and the hooks of the user (``save_on_cpu``), of a checkpoint
or of another sharded model see each tensor as often as they would without us. The model's outermost call pushes our pair, over
what is around the model. A pair that is pushed inside the model covers ours: the next module call or lookup of a parameter
puts one of ours, with that pair as a layer, in its place. Whoever pushed it pops that, as pops do not look at what they pop.

Autograd compares versions only of what goes through no hooks at all. So that is done here where there are none but ours:
a tensor that was changed since it was saved is an error. A step saves thousands of tensors, and each object that Python makes
for one is another that its garbage collector counts, and looks at: an activation is kept as it is, and the version that it had
only where that was not 0.
"""

import contextlib
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any, NamedTuple, NoReturn, Protocol

import torch
from torch.utils import checkpoint

from unwall.runtime import handed, transforms
from unwall.runtime.stand_ins import StandIns
from unwall.runtime.turns import is_executed
from unwall.shards import default_hooks
from unwall.shards.flat import SavedViews
from unwall.shards.group import Group
from unwall.shards.local import distributed_like, local

_TENSOR, _STRIDED = torch.Tensor, torch.strided
_is_wrapped = transforms.is_wrapped
_new_tuple: Any = tuple.__new__  # that of a NamedTuple is written in Python


class Layer(Protocol):
    """One thing that happens to what autograd saves. What a layer before has packed may be no tensor any more."""

    def pack(self, value: Any, /) -> Any: ...

    def unpack(self, packed: Any, /) -> Any: ...


class Called(Protocol):
    """A module call, and the Python frame that makes it."""

    caller: FrameType | None


class OwnLayer(Layer, Protocol):
    """One of ours. Where it packs a tensor as a tensor it is the same one, and is not unpacked."""

    active: bool
    """Whether it does anything now to what is packed."""


class Hooks(NamedTuple):
    """A pair of hooks that was there before ours, as a layer."""

    pack: Callable[[Any], Any]
    unpack: Callable[[Any], Any]


class Kept(NamedTuple):
    """A view of a flat buffer that autograd has saved, where no hooks but ours are."""

    group: int
    value: Any
    """The view, detached; or what a layer has made of it."""
    version: int | None
    views: SavedViews
    """What goes with it: then it counts as ours."""


class SavedTensors:
    """See [Note: saved tensors]. ``reading`` is told of each group before backward gets a tensor of it."""

    def __init__(self, groups: Sequence[Group], reading: Callable[[int], None]) -> None:
        self.reading = reading
        self.layers: list[OwnLayer] = []
        """What saved tensors go through after the user's hooks, if there are any."""
        self.seen: Callable[[Any, Any], None] | None = None
        """Told of each tensor before anything happens to it, and of the checkpoint that takes it, if one does: its ``pack``. In
        passes that are measured; set between two passes."""
        self.watching = False
        """A pair of ours is in place."""
        self.pushed: Any = None
        """Its ``pack``: what is usually on top."""
        self.look: default_hooks.Look | None = None
        """While watching: says what is on top."""
        self.stand_ins = StandIns()
        self.groups = groups
        self.flats: dict[int, int] = {}
        """From storages that come and go to groups."""
        self._streams = False
        self.homes = 0
        """Counts changes of that: what was found out before one may not hold any more."""
        self.follow(groups)

    def follow(self, groups: Sequence[Group]) -> None:
        """What is saved of these groups goes through here."""
        for group in groups:
            if group.evictable:
                group.buffer.make_known(self.flats, group.index)
        self._streams = bool(self.flats)
        self.homes += 1

    def follow_anew(self) -> None:
        """Groups have other homes: some come and go that did not before, or the other way round."""
        self.flats.clear()
        self.follow(self.groups)

    @property
    def streams(self) -> bool:
        """Whether there are groups that come and go."""
        return self._streams

    @property
    def idle(self) -> bool:
        """Whether nothing is to be done to what autograd saves."""
        return not self._streams and not self.layers and self.seen is None

    def group_of(self, tensor: torch.Tensor) -> int | None:
        """The group that comes and goes of which this is a view."""
        if tensor.layout is not _STRIDED or _is_wrapped(tensor):
            return None  # sparse tensors and their like have no storage of their own
        part = tensor if type(tensor) is _TENSOR else local(tensor)
        return self.flats.get(part.untyped_storage()._cdata)

    def watch(self) -> "Pair | None":
        """From now on what is saved goes through here, unless it does already. The result is for ``unwatch``."""
        if self.idle or transforms.inside():  # torch.func allows no hooks on saved tensors
            return None
        top = _top()
        owner = _owner(top)
        if owner is not None and owner.saved is self:
            return None
        pair = self._over(top)
        self.pushed = pair.pack
        default_hooks.push(self.pushed, pair.unpack)
        self.watching, self.look = True, default_hooks.look()
        return pair

    def cover(self) -> None:
        """A pair that was pushed over ours becomes a layer of one of ours, which takes its place."""
        if self.look is None or (top := self.look(True)) is None or top[0] is self.pushed:
            return
        if _owner(top) is None:  # another sharded model's has ours among its layers
            pair = self._over(top)
            default_hooks.pop()
            default_hooks.push(pair.pack, pair.unpack)

    def unwatch(self, pair: "Pair") -> None:
        """Ends what ``watch`` began. Pairs that someone pushed since and has not popped yet stay."""
        self.watching, self.pushed, self.look = False, None, None
        above: list[Any] = []
        while (top := default_hooks.top()) is not None and _owner(top) is not pair:
            above.append(top)
            default_hooks.pop()
        if top is not None or not default_hooks.visible():
            default_hooks.pop()
        for pack, unpack in reversed(above):
            default_hooks.push(pack, unpack)

    def _over(self, top: Any) -> "Pair":
        return Pair(self, tuple(self.layers), None if top is None else Hooks(*top))

    def shown(self, value: torch.Tensor) -> torch.Tensor:
        """What backward gets: a view of a flat buffer whose group is resident, or any other tensor as it is."""
        view = self.stand_ins.meant_by(value)
        # Also where hooks gave back another tensor than they got, or recomputed it meanwhile.
        index = self.group_of(value) if view is None else view.group
        if index is None:
            return value
        self.reading(index)
        if view is None:
            return value
        storage = self.groups[index].buffer.tensor.untyped_storage()
        part = local(value).new_empty(0).set_(storage, view.offset, view.shape, view.stride)
        return distributed_like(value, part)

    def views_of(self, index: int) -> SavedViews:
        """What goes with each view of a group's flat buffer that autograd holds: then it counts as ours."""
        return self.groups[index].buffer.saved

    def refuse_changed(self, index: int | None) -> NoReturn:
        """A tensor was changed since it was saved."""
        name = "a tensor" if index is None else f"a parameter of group {self.groups[index].name}"
        raise RuntimeError(
            f"backward needs {name} as it was in forward, but it has been modified since by an inplace "
            "operation, or by an optimizer's step: run forward again"
        )


class Pair:
    """A pair of default hooks: the guard of flat buffers around some layers. See [Note: layers]."""

    __slots__ = ("_checkpoint", "_homes", "_layers", "_taker", "_under", "_versions", "call", "saved")

    def __init__(self, saved: SavedTensors, layers: tuple[OwnLayer, ...], under: Hooks | None) -> None:
        self.saved = saved
        self.call: Callable[[], Called | None] | None = None
        """A weak reference to the call that it is there for. None: it is about to begin."""
        self._layers = layers
        """Ours. They give back the tensor that they got, or a copy of an activation: what was known of it then still holds."""
        self._under = under
        """What comes before them: hooks that are not ours."""
        self._checkpoint = under is not None and under.pack.__module__ == checkpoint.__name__
        """Those are a checkpoint's. See [Note: stand-ins]."""
        self._taker = under.pack if under is not None and self._checkpoint else None
        self._homes = saved.homes
        self._versions: dict[int, int | None] = {}
        """Of activations (by the id of what is kept of them) that had another version than 0. None: it cannot be asked."""

    def is_over(self) -> bool:
        """Whether its call has ended. Nothing pops it after an interrupt: it goes when this thread next calls a model."""
        call = None if self.call is None else self.call()
        if call is None:
            return self.call is not None
        return call.caller is None or not is_executed(call.caller)

    def pack(self, tensor: torch.Tensor) -> Any:
        """As long as it is for the sake of few Python calls: it is called for each tensor that is saved."""
        saved = self.saved
        if saved.seen is not None:
            saved.seen(tensor, self._taker)
        if type(tensor) is _TENSOR and tensor.layout is _STRIDED and not _is_wrapped(tensor):
            index = saved.flats.get(tensor.untyped_storage()._cdata)
        else:
            index = saved.group_of(tensor)
        if self._under is not None:
            return self._pack_over(self._under, index, tensor)
        value: Any = tensor
        for layer in self._layers:
            if layer.active:
                value = layer.pack(value)
        version: int | None = None
        if isinstance(value, _TENSOR):
            # Detached: a node that saves its own output would otherwise hold itself, and an abandoned graph would never go.
            value = value.detach()
            try:
                version = value._version
            except RuntimeError:  # an inference tensor
                version = None
        if index is not None:
            return _new_tuple(Kept, (index, value, version, saved.groups[index].buffer.saved))
        if version != 0:
            self._versions[id(value)] = version
        elif self._versions:
            self._versions.pop(id(value), None)  # of one that is gone, and had the same id
        return value

    def _pack_over(self, under: Hooks, index: int | None, tensor: torch.Tensor) -> tuple[int | None, Any]:
        """The same over hooks that are not ours."""
        if index is None or self._checkpoint:
            value = under.pack(tensor if index is None else self.saved.stand_ins.of(index, tensor))
            index = None
        else:
            value = self._handed(under, index, tensor)
        for layer in self._layers:
            value = layer.pack(value)
        return index, value

    def _handed(self, hooks: Hooks, index: int, tensor: torch.Tensor) -> Any:
        """See [Note: handed to hooks] in handed.py."""
        packed = [hooks.pack(handed.alias(tensor))]
        handed.Claim(lambda found: self.saved.group_of(found) == index, self.saved.views_of(index)).search(packed)
        return packed[0]

    def unpack(self, packed: Any) -> Any:
        if self._under is not None:
            return self._unpack_over(self._under, *packed)
        saved, value, index = self.saved, packed, None
        if type(packed) is Kept:
            index, value, version, _ = packed
            saved.reading(index)
        else:
            version = self._versions.get(id(value), 0) if self._versions else 0
        if not isinstance(value, _TENSOR):
            for layer in reversed(self._layers):
                value = layer.unpack(value)
        elif version is not None and value._version != version:
            saved.refuse_changed(index)
        if self._homes != saved.homes and isinstance(value, _TENSOR):
            return saved.shown(value)
        return value

    def _unpack_over(self, under: Hooks, index: int | None, value: Any) -> Any:
        if index is not None:
            self.saved.reading(index)  # first: hooks may read what they kept of the flat buffer
        for layer in reversed(self._layers):
            value = layer.unpack(value)
        value = under.unpack(value)
        return self.saved.shown(value) if isinstance(value, _TENSOR) else value


def _top() -> Any:
    """The pair on top of this thread's that is still meant."""
    while (owner := _owner(top := default_hooks.top())) is not None and owner.is_over():
        default_hooks.pop()
    return top


def _run_as_they_are(*functions: Callable[..., Any]) -> None:
    """Dynamo runs them, and all that they call, instead of tracing them: it looks at each frame below one that it skips, and
    what it makes of a tensor has another version than the tensor. Costs nothing where nothing is compiled."""
    with contextlib.suppress(AttributeError):  # private to torch: a version without it traces them, as before
        dynamo = torch._C._dynamo.eval_frame
        skip = dynamo._FrameExecStrategy(dynamo._FrameAction.SKIP, dynamo._FrameAction.SKIP)
        for function in functions:
            dynamo.set_code_exec_strategy(function.__code__, skip)


_run_as_they_are(Pair.pack, Pair.unpack)


def _owner(top: Any) -> Pair | None:
    """Whose it is, if it is a sharded model's."""
    found = None if top is None else getattr(top[0], "__self__", None)
    return found if isinstance(found, Pair) else None
