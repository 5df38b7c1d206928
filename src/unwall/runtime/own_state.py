"""What a block keeps in attributes of its modules, and draws from Python's and numpy's generators, as a call found it.

[Note: half a call]
A call that ended half way may have counted, or put something into a list: run again, it would do so twice, without a word. So
attributes, what is in lists, dictionaries and sets there, and the generators are noted before a call, and put back before the
next try. A tensor there that was written in place cannot be: then there is none. What a block keeps in objects of other kinds,
or outside of its modules, is not seen.

That takes tens of microseconds. So it is done in the first calls of each mode (training or not, with gradients or not), and
after that only where the block was seen to change something.
"""

import copy
import random
from collections import deque
from typing import Any

import numpy as np
import torch
from torch import nn

CALLS = 2
"""So many calls of a mode are looked at. What the last of them changes counts: the first may make what stays."""
_DEEPEST, _LONGEST = 3, 64
"""Of containers in containers, and of those whose entries are looked at."""
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))
_ABSENT = object()


class Found:
    """What one call has found."""

    def __init__(self, block: nn.Module) -> None:
        self._block = block
        self._attributes = _attributes(block)
        self._containers: list[tuple[Any, Any]] = []
        self._tensors: list[tuple[torch.Tensor, int]] = []
        for found in self._attributes.values():
            for value in found.values():
                self._look(value, _DEEPEST)
        self._python, self._numpy = random.getstate(), np.random.get_state(legacy=False)

    def _look(self, value: Any, deep: int) -> None:
        if isinstance(value, torch.Tensor):
            if not isinstance(value, nn.Parameter) and not value.is_inference():
                self._tensors.append((value, value._version))
        elif isinstance(value, list | tuple | dict | set | deque):
            if type(value) in (list, dict, set, deque):
                self._containers.append((value, copy.copy(value)))
            if deep and len(value) <= _LONGEST:
                for each in value.values() if isinstance(value, dict) else value:
                    self._look(each, deep - 1)

    def can_be_put_back(self) -> bool:
        return all(tensor._version == version for tensor, version in self._tensors)

    def is_same(self) -> bool:
        now = _attributes(self._block)
        return (
            self.can_be_put_back()
            and all(_same_entries(now.get(module, {}), found) for module, found in self._attributes.items())
            and all(_same_content(container, content) for container, content in self._containers)
            and random.getstate() == self._python
            and _same_numpy(np.random.get_state(legacy=False), self._numpy)
        )

    def put_back(self) -> None:
        now = _attributes(self._block)
        for module, found in self._attributes.items():
            if not _same_entries(now.get(module, {}), found):
                for name in now.get(module, {}).keys() - found.keys():
                    del vars(module)[name]
                vars(module).update(found)
        for container, content in self._containers:
            if not _same_content(container, content):
                container.clear()
                (container.update if isinstance(container, dict | set) else container.extend)(content)
        random.setstate(self._python)
        np.random.set_state(self._numpy)


class OwnState:
    """Of one block. See [Note: half a call]."""

    def __init__(self, block: nn.Module) -> None:
        self._block = block
        self._left: dict[tuple[bool, bool], int] = {}
        self._writes = False

    def note(self) -> Found | None:
        """A call begins. None: it is known to change nothing."""
        mode = self._block.training, torch.is_grad_enabled()
        left = self._left.get(mode, CALLS)
        return Found(self._block) if left or self._writes else None

    def ended(self, found: Found | None) -> None:
        """It has ended well."""
        mode = self._block.training, torch.is_grad_enabled()
        left = self._left.get(mode, CALLS)
        if found is not None and left:
            self._left[mode] = left - 1
            self._writes = self._writes or (left == 1 and not found.is_same())


def _attributes(block: nn.Module) -> dict[nn.Module, dict[str, Any]]:
    return {
        module: {name: value for name, value in vars(module).items() if name not in _OF_EVERY_MODULE}
        for module in block.modules()
    }


def _same_entries(now: dict[str, Any], before: dict[str, Any]) -> bool:
    return len(now) == len(before) and all(_same(now.get(name, _ABSENT), value) for name, value in before.items())


def _same_content(now: Any, before: Any) -> bool:
    if len(now) != len(before):
        return False
    if isinstance(now, dict):
        return _same_entries(now, before)
    if isinstance(now, set):
        return bool(now == before)
    return all(_same(one, other) for one, other in zip(now, before, strict=True))


def _same(one: Any, other: Any) -> bool:
    if one is other:
        return True
    return type(one) is type(other) and isinstance(one, bool | int | float | str) and one == other


def _same_numpy(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return all(np.array_equal(one["state"][name], other["state"][name]) for name in one["state"]) and (
        one["has_gauss"] == other["has_gauss"]
    )
