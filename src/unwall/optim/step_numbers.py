"""The numbers with which an optimizer steps, for the ranks to compare: each of them updates its own part of a parameter.

[Note: the same numbers]
A learning rate that one rank has set and another has not would make every parameter a mixture, part by part. So a step hands
its numbers to the agreement (schedule/agreement.py), which puts their fingerprint into what the ranks exchange anyway, and
names those that differ. Only numbers that the optimizer knows are compared, not whatever else lies in a param group.
"""

from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

Numbers = tuple["array[float]", Callable[[], list[str]], str]
_PLAIN = (int, float)
_ADVICE = (
    "Each rank updates its own part of every parameter, so the model has become a mixture. Set the same on all ranks (a "
    "scheduler that looks at a loss needs the same loss everywhere: average it over them)"
)


def numbers_of(groups: Sequence[Mapping[str, Any]], options: Sequence[str], clip: float | None) -> Numbers:
    """Of a step, what they are called, and what to do where they differ. ``options``: names of those that count; ``clip``: the
    norm to which gradients are clipped."""
    values = array("d", () if clip is None else (clip,))
    for group in groups:
        values.append(len(group["params"]))
        for name in options:
            option = group.get(name)
            if isinstance(option, _PLAIN):
                values.append(option)
            elif option is not None:
                values.extend(_numbers_in(option))
    return values, lambda: _names(groups, options, clip), _ADVICE


def _names(groups: Sequence[Mapping[str, Any]], options: Sequence[str], clip: float | None) -> list[str]:
    names = [] if clip is None else ["max_grad_norm"]
    for number, group in enumerate(groups):
        names.append(f"the number of parameters of param group {number}")
        names += [f"{name} of param group {number}" for name in options for _ in _numbers_in(group.get(name))]
    return names


def _numbers_in(option: Any) -> Iterator[float]:
    if isinstance(option, _PLAIN):
        yield option
    elif isinstance(option, torch.Tensor):
        if option.numel() == 1 and option.device.type == "cpu":  # elsewhere a look would wait for the device
            yield float(option)
    elif isinstance(option, tuple | list):
        for part in option:
            yield from _numbers_in(part)
