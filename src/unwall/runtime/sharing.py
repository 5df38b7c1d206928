"""Memory that a parameter would share with something else from now on, because its ``.data`` was set to it.

[Note: shared from now on]
After ``a.data = b.data`` plain PyTorch has one memory for both: a step changes both. Sharded parameters cannot share, so ``a``
has a copy, and the next edge raises, unless one of them was given another ``.data`` before (as where two are swapped). A tensor
that cannot become the value itself (a part of a larger one, one of another dtype) is copied, too. What is written to it before
the next step is found by its version counter, and raises.
"""

import weakref
from collections.abc import Callable

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

_tied = WeakIdKeyDictionary()
"""Of all models, parameter -> weak reference to the one whose memory it was given."""


class Sharing:
    """Of one model's parameters. See [Note: shared from now on]."""

    def __init__(self) -> None:
        self.copied: dict[int, tuple[nn.Parameter, torch.Tensor, int]] = {}
        """By id, parameters whose values were copied: what counts the writes to the original, and what it has counted."""
        self._age = 0

    def given(self, param: nn.Parameter) -> None:
        """``param.data`` was set: whatever it was set to before does not matter any more, nor who was given its memory."""
        self.copied.pop(id(param), None)
        for other in [other for other, known in list(_tied.items()) if other is param or known() is param]:
            del _tied[other]

    def tied(self, param: nn.Parameter, other: nn.Parameter) -> None:
        """It was set to the memory of another parameter."""
        _tied[param] = weakref.ref(other)

    def copied_from(self, param: nn.Parameter, original: torch.Tensor, age: int) -> None:
        """It was set to something that it has a copy of. ``age``: another one when parameters have changed."""
        self._forget_before(age)
        if not original.is_inference():
            counter = original.detach()
            seen = counter._version
            counter.data = counter.new_empty(0)  # keeps the counter, and no memory
            self.copied[id(param)] = param, counter, seen

    def _forget_before(self, age: int) -> None:
        if self._age != age:
            self._age = age
            self.copied.clear()

    def look(self, age: int, is_ours: Callable[[nn.Parameter], bool], name_of: Callable[[nn.Parameter], str]) -> None:
        """An edge. RuntimeError where a copy is not what plain PyTorch would have."""
        if _tied.data:  # as the whole is called at each edge: no Python call to count them
            ours = [(param, known()) for param, known in list(_tied.items()) if is_ours(param)]
            for param, _ in ours:
                del _tied[param]
            for param, other in ours:
                if other is not None:
                    theirs = name_of(other) if is_ours(other) else "a parameter of another sharded model"
                    raise _shared(name_of(param), theirs)
        if not self.copied:
            return
        self._forget_before(age)
        written = [name_of(param) for param, counter, seen in self.copied.values() if counter._version != seen]
        if written:
            self.copied.clear()
            raise RuntimeError(
                f"{', '.join(written[:5])}: .data was set to a tensor that cannot be the parameter itself (a part of a larger "
                "one, or one of another dtype or device), so it has a copy of it, and what was written to that tensor since is "
                "not in the model. Write to the parameter, or set .data again"
            )


def _shared(name: str, other: str) -> RuntimeError:
    return RuntimeError(
        f".data of {name} was set to that of {other}: plain PyTorch would have one memory for both from now on, which sharded "
        "parameters cannot have, so it has a copy. For a copy write a.data.copy_(b.data) or a.data = b.data.clone(); to tie "
        "them, one parameter for both (a_module.weight = b_module.weight)"
    )
