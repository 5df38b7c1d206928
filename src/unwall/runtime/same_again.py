"""Whether a block computes the same when it runs again, tried the first times that it does.

[Note: tried twice]
A block may read what its own call changes: an object that it was given, a large attribute, a list that it fills. Run again, it
would compute something else, and gradients would be wrong without a word: torch's checkpoint compares shapes and dtypes alone.
So its first calls are run again to their end (torch's checkpoint otherwise stops where nothing more is needed),
and some elements of what they give are compared with those of the forward: of the output, and of tensors with a graph that are
left in an object. What differs by more than rounding explains is an error. On the CPU that is little: the same kernels give the
same bits. On an accelerator sums come in any order, in TF32 or half precision inside, and a router may choose another expert
where two are nearly alike.

Small attributes that it writes, and random numbers of Python's and numpy's that it draws, are noticed in the same calls. From
then on they are put back, as torch's own random numbers are (attributes.py).
"""

import dataclasses
import pickle
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.checkpoint import set_checkpoint_early_stop

from unwall.runtime import transforms
from unwall.runtime.attributes import Attributes, Noted, put
from unwall.runtime.block_state import tensors_in

TRIED_CALLS = 2
ELEMENTS = 512
FEWEST = 16
"""Tensors with fewer elements say little: a sum that is nearly 0 may be anything."""
SLACK, SLACK_ELSEWHERE = (2e-2, 1e-3), (5e-2, 5e-2)
"""How far the elements of a tensor may differ from those of the forward, on the CPU and on others: in 16 bits, in more."""
_STEPS = (1, 7, 31, 127)
"""How far apart the elements that are compared lie in each dimension."""
Drawn = tuple[Any, ...]
Sample = dict[object, torch.Tensor]
"""Elements of tensors: of the output by their numbers, of objects by where they are."""


class SameAgain:
    """One block. See [Note: tried twice]."""

    def __init__(self, block: nn.Module) -> None:
        self.name = type(block).__name__
        self.left = TRIED_CALLS
        self.draws = False
        """It draws random numbers of Python's or numpy's."""
        self.attributes = Attributes(block)

    def begin(self) -> "Run | None":
        """One call of it, and what is run again of that. None: nothing is to be done."""
        return Run(self) if self.left > 0 or self.draws or self.attributes.written else None

    def whole(self) -> AbstractContextManager[Any]:
        """Around the checkpoint of a call: while it is tried, it runs to its end again."""
        return set_checkpoint_early_stop(False) if self.left > 0 else nullcontext()


class Run:
    """A forward, and the same again as often as backward wants it."""

    def __init__(self, block: SameAgain) -> None:
        self._block = block
        self._is_first = True
        self._drawn: Drawn | None = None
        self._then: list[Noted] = []
        self._found: Sample | None = None

    def run(self, call: Callable[[], Any], given: tuple[Any, ...]) -> Any:
        if self._is_first:
            self._is_first = False
            return self._forward(call, given)
        with self._of_then():
            output = call()
        if self._found is not None and not alike(self._found, sample(output, given)):
            raise RuntimeError(
                f"a recomputed block ({self._block.name}) computes something else when it runs again, so gradients would be "
                "wrong: it reads what its call has changed (a large attribute, an object that it was given, a list). Keep "
                "that in a buffer, or use Plan(activations='keep')"
            )
        return output

    def _forward(self, call: Callable[[], Any], given: tuple[Any, ...]) -> Any:
        block, tried = self._block, self._block.left > 0
        before, noted = _drawn() if tried or block.draws else None, block.attributes.note(everything=tried)
        output = call()
        if tried:
            block.left -= 1
            block.draws = block.draws or not _same(before, _drawn())
            noted = block.attributes.learn(noted)
            self._found = sample(output, given)
        self._drawn = before if block.draws else None
        self._then = block.attributes.of_then(noted)
        return output

    @contextmanager
    def _of_then(self) -> Iterator[None]:
        """What the block finds is what it found in forward, and afterwards what is there now."""
        now, noted = None if self._drawn is None else _drawn(), self._block.attributes.note(everything=False)
        if self._drawn is not None:
            _put(self._drawn)
        put(self._then)
        try:
            yield
        finally:
            if now is not None:
                _put(now)
            put(noted)


def sample(output: Any, given: tuple[Any, ...] = ()) -> Sample:
    """Some elements of each floating-point tensor of what a block gives, and of objects of the user's that it was given. Nobody
    waits for the device."""
    found: Sample = {} if _is_object(output) else dict(enumerate(tensors_in(output)))
    for at, value in enumerate((output, *given)):
        if _is_object(value):  # others may have put more into it since: what is there under the same name counts
            found |= {
                (at, name): each for name, each in vars(value).items() if type(each) is torch.Tensor and each.requires_grad
            }
    with torch.no_grad():
        return {key: _elements(tensor) for key, tensor in found.items() if _is_sampled(tensor)}


def _is_sampled(tensor: torch.Tensor) -> bool:
    if tensor.layout is not torch.strided or tensor.is_nested or transforms.is_wrapped(tensor):
        return False
    return tensor.is_floating_point() and tensor.dtype.itemsize > 1 and tensor.numel() >= FEWEST


def _elements(tensor: torch.Tensor) -> torch.Tensor:
    count = torch.arange(min(ELEMENTS, tensor.numel()), device=tensor.device)
    places = [count * _STEPS[-1 - at % len(_STEPS)] % size for at, size in enumerate(reversed(tensor.shape))]
    return tensor.detach()[tuple(reversed(places))].clone()


def _is_object(value: Any) -> bool:
    plain = isinstance(value, torch.Tensor | nn.Module | Mapping | type) or dataclasses.is_dataclass(value) or callable(value)
    return not plain and hasattr(value, "__dict__")


def alike(found: Sample, again: Sample) -> bool:
    """Whether these are the same, but for rounding. Waits for the device."""
    outputs, others = ({key for key in each if isinstance(key, int)} for each in (found, again))
    return outputs == others and all(_near(one, again[key]) for key, one in found.items() if key in again)


def _near(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    size = one.double().abs().sum()
    apart = (one.double() - other.double()).abs().sum()
    slack = SLACK if one.device.type == "cpu" else SLACK_ELSEWHERE
    return not bool(torch.isfinite(size)) or bool(apart <= slack[one.dtype.itemsize > 2] * size)


def _drawn() -> Drawn:
    return random.getstate(), np.random.get_state(legacy=False)


def _put(drawn: Drawn) -> None:
    random.setstate(drawn[0])
    np.random.set_state(drawn[1])


def _same(one: Drawn | None, other: Drawn) -> bool:
    return pickle.dumps(one) == pickle.dumps(other)
