"""What a block keeps in plain attributes of its modules from one call to the next: a recurrent state, a count, a generator.

[Note: plain attributes]
torch's checkpoint knows nothing of them, and a block that reads what an earlier call has left there would compute something
else when it runs again. Which ones a block writes is seen in its first calls, by what was there before and what is there after.
From then on their values are noted before each forward. While the block runs again they have their values of then, and
afterwards those of now. What is large is not noted: holding it would cost what recomputing saves.
"""

from typing import Any, NamedTuple

import torch
from torch import nn

from unwall.runtime import transforms
from unwall.runtime.block_state import is_expanded

LARGEST_BYTES = 1 << 24
COPIED_BYTES = 1 << 16
"""Tensors up to this size may be written in place: of those copies are taken."""
_PLAIN = (bool, int, float, str, type(None), torch.Generator)
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))
_ABSENT = object()


class Noted(NamedTuple):
    """One attribute as it is: what is there, and its values where those may change."""

    module: nn.Module
    name: str
    value: Any
    values: Any

    @property
    def key(self) -> tuple[int, str]:
        return id(self.module), self.name

    def is_same(self) -> bool:
        """Whether nothing has changed since."""
        found = vars(self.module).get(self.name, _ABSENT)
        if found is not self.value:
            return isinstance(found, bool | int | float | str) and type(found) is type(self.value) and found == self.value
        return self.values is None or bool(torch.equal(self.values, _values(found)))

    def put(self) -> None:
        if self.value is _ABSENT:
            vars(self.module).pop(self.name, None)
            return
        vars(self.module)[self.name] = self.value
        if isinstance(self.value, torch.Generator):
            self.value.set_state(self.values)
        elif self.values is not None:
            self.value.data.copy_(self.values)


class Attributes:
    """Those of one block's modules. See [Note: plain attributes]."""

    def __init__(self, block: nn.Module) -> None:
        self._block = block
        self.written: dict[tuple[int, str], nn.Module] = {}

    def note(self, everything: bool) -> list[Noted]:
        """As they are now: all of them, or those that the block is known to write."""
        if everything:
            named = [(module, name) for module in self._block.modules() for name in vars(module)]
        else:
            named = [(module, name) for (_, name), module in self.written.items()]
        return [_noted(module, name) for module, name in named if _is_noted(name, vars(module).get(name))]

    def learn(self, before: list[Noted]) -> list[Noted]:
        """The block has run, in a call that is tried. Returns what was there before, and what was not."""
        known = {noted.key for noted in before}
        now = self.note(everything=True)
        fresh = [Noted(noted.module, noted.name, _ABSENT, None) for noted in now if noted.key not in known]
        for noted in (*before, *fresh):
            if not noted.is_same():
                self.written[noted.key] = noted.module
        return [*before, *fresh]

    def of_then(self, before: list[Noted]) -> list[Noted]:
        """What is put back when the block runs again. Without the graphs that tensors came from."""
        return [noted._replace(value=_alone(noted.value)) for noted in before if noted.key in self.written]


def _noted(module: nn.Module, name: str) -> Noted:
    value = vars(module).get(name, _ABSENT)
    return Noted(module, name, value, _values(value, copied=True))


def put(noted: list[Noted]) -> None:
    for each in noted:
        each.put()


def _is_noted(name: str, value: Any) -> bool:
    if name in _OF_EVERY_MODULE:
        return False
    if type(value) is torch.Tensor:
        if value.layout is not torch.strided or value.is_meta or value.is_nested or transforms.is_wrapped(value):
            return False
        return value.nbytes <= LARGEST_BYTES and not value.is_inference()
    return isinstance(value, _PLAIN)


def _values(value: Any, copied: bool = False) -> Any:
    if isinstance(value, torch.Generator):
        return value.get_state()
    if type(value) is not torch.Tensor or value.nbytes > COPIED_BYTES or value.requires_grad or is_expanded(value):
        return None
    return value.detach().clone() if copied else value.detach()


def _alone(value: Any) -> Any:
    if type(value) is torch.Tensor and value.requires_grad:
        return value.detach().requires_grad_()
    return value
