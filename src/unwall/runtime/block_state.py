"""What a block finds when it runs again in backward: its buffers and its arguments, as they were in forward.

[Note: the same again]
A recomputed block must compute what it has computed. torch's checkpoint puts random generators back, and notices where one of
the tensors that it was given was changed in place. It does not look at two others:

- Buffers that the block writes (statistics, the vectors of a spectral norm, a codebook). The forward that runs again begins
  with their values of then, and leaves those of now. Copies are taken of small ones, of those that the block is known to write,
  and of all when it first runs in a mode: by their versions it is seen then which of them it writes.
- What is inside of tuples, dictionaries and the like. A tensor there that was changed meanwhile is an error. Entries that the
  block, or someone else, has put in the place of others are there as they were, in copies that the block is given.
"""

import copy
import dataclasses
from collections import UserDict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, NamedTuple

import torch
from torch import nn

SMALL_BYTES = 1 << 16


class Slot(NamedTuple):
    """A buffer of one of a block's modules: what is there, its version, and a copy of its values where there is one."""

    module: nn.Module
    name: str
    tensor: torch.Tensor
    version: int
    copy: torch.Tensor | None

    @property
    def key(self) -> tuple[int, str]:
        return id(self.module), self.name

    def changed(self) -> bool:
        """Whether it was written, or another tensor is in its place."""
        return self.module._buffers.get(self.name) is not self.tensor or _version(self.tensor) != self.version

    def put(self) -> None:
        """It is in its place again, with its values."""
        self.module._buffers[self.name] = self.tensor
        if self.copy is not None:
            self.tensor.data.copy_(self.copy)


class Buffers:
    """A block's buffers. See [Note: the same again]."""

    def __init__(self, block: nn.Module) -> None:
        self._block = block
        self._tried: set[bool] = set()
        """Modes (training or not) in which it has run."""
        self.written: set[tuple[int, str]] = set()

    def contexts(self) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        """For a forward, and for the forward that is run again."""
        forward = _Forward(self)
        return forward, _Again(self, forward)

    def slots(self, copied: bool) -> list[Slot]:
        """All of them, with copies of all or of those that it may write."""
        found = []
        for module in self._block.modules():
            for name, tensor in module._buffers.items():
                if tensor is not None:
                    small = tensor.numel() * tensor.element_size() <= SMALL_BYTES  # sparse ones have no nbytes
                    wanted = (copied or small or (id(module), name) in self.written) and not is_expanded(tensor)
                    found.append(Slot(module, name, tensor, _version(tensor), tensor.detach().clone() if wanted else None))
        return found

    def begin(self) -> list[Slot]:
        return self.slots(copied=self._block.training not in self._tried)

    def end(self, slots: list[Slot], whole: bool) -> list[Slot]:
        """Those that the forward has changed, as they were. ``whole``: it came to its end."""
        changed = [slot for slot in slots if slot.changed()]
        if whole:
            self._tried.add(self._block.training)
        self.written.update(slot.key for slot in changed)
        return changed


class _Forward:
    def __init__(self, buffers: Buffers) -> None:
        self._buffers = buffers
        self.slots: list[Slot] = []

    def __enter__(self) -> None:
        self.slots = self._buffers.begin()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None) -> None:
        self.slots = self._buffers.end(self.slots, whole=kind is None)


class _Again:
    """A graph that is kept may run it several times."""

    def __init__(self, buffers: Buffers, forward: _Forward) -> None:
        self._buffers, self._forward = buffers, forward
        self._now: list[Slot] = []

    def __enter__(self) -> None:
        for slot in self._forward.slots:
            if slot.copy is None and _version(slot.tensor) != slot.version:
                raise RuntimeError(
                    f"a recomputed block ({type(slot.module).__name__}) has written its buffer {slot.name} in forward, which "
                    "it did not do before, so its values of then are lost: call zero_grad() and run the iteration again, or "
                    "use Plan(activations='keep')"
                )
        self._now = self._buffers.slots(copied=True)  # all of them: a batch norm does not count its writes as changes
        for slot in self._forward.slots:
            slot.put()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None) -> None:
        now, self._now = self._now, []
        for slot in now:
            slot.put()


class Given:
    """What is inside of what a block is given. The tensors that it is given themselves are autograd's to look after."""

    def __init__(self, values: Iterable[Any]) -> None:
        memo: dict[int, Any] = {}
        self._first = True
        self._values = {at: _copied(value, memo) for at, value in enumerate(values) if not isinstance(value, torch.Tensor)}
        self._versions = [(tensor, _version(tensor)) for tensor in tensors_in(list(self._values.values()))]

    def again(self, values: tuple[Any, ...]) -> tuple[Any, ...]:
        """What the block runs on: in forward these, later what they were then. RuntimeError where that is lost."""
        if self._first:
            self._first = False
            return values
        for tensor, version in self._versions:
            if _version(tensor) != version:
                raise RuntimeError(
                    f"a recomputed block was given a tensor of shape {tuple(tensor.shape)} inside of another value, which has "
                    "been modified since by an inplace operation: do it out of place, or use Plan(activations='keep')"
                )
        memo: dict[int, Any] = {}  # once more: a graph that is kept may run it several times
        return tuple(_copied(self._values[at], memo) if at in self._values else value for at, value in enumerate(values))


def _copied(value: Any, memo: dict[int, Any]) -> Any:
    """The same entries in containers of its own. What knows no entries, or cannot be copied, is itself."""
    if id(value) in memo:
        return memo[id(value)]
    if type(value) is tuple or (isinstance(value, tuple) and hasattr(value, "_fields")):
        parts = [_copied(part, memo) for part in value]
        if all(part is before for part, before in zip(parts, value, strict=True)):
            return value
        make: Any = tuple if type(value) is tuple else type(value)._make  # type: ignore[attr-defined]
        return make(parts)
    is_data = dataclasses.is_dataclass(value) and not isinstance(value, type | nn.Module)
    if not (isinstance(value, list | dict | UserDict) or is_data):
        return value  # a copy of another mapping may share what is inside
    try:
        found = memo[id(value)] = copy.copy(value)
        if isinstance(found, list):
            found[:] = [_copied(part, memo) for part in value]
        elif isinstance(found, dict | UserDict):
            for key in value:
                found[key] = _copied(value[key], memo)
        else:
            for field in dataclasses.fields(value):
                if hasattr(value, field.name):
                    object.__setattr__(found, field.name, _copied(getattr(value, field.name), memo))
    except Exception:  # a class of the user's that does not allow it
        found = memo[id(value)] = value
    return found


def tensors_in(value: Any, around: tuple[int, ...] = ()) -> Iterator[torch.Tensor]:
    """Plain ones, alone or inside of containers: parameters are looked after elsewhere. ``around``: containers that hold it."""
    if type(value) is torch.Tensor:
        yield value
        return
    parts: Iterable[Any] = ()
    if isinstance(value, tuple | list):
        parts = value
    elif isinstance(value, Mapping):
        parts = value.values()
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        parts = (getattr(value, field.name, None) for field in dataclasses.fields(value))
    if id(value) not in around:  # it may hold itself
        for part in parts:
            yield from tensors_in(part, (*around, id(value)))


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def is_expanded(tensor: torch.Tensor) -> bool:
    """Whether elements lie in one place of the memory (``expand``). Nothing can write to such a tensor, nor needs to."""
    strided = tensor.layout is torch.strided
    return strided and any(size > 1 and stride == 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
