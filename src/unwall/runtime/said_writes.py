"""Values that ranks write to a parameter outside every pass: each rank takes its own part of what it wrote, so they must be the
same. The ranks compare a few sums, in words that they exchange anyway (``Agreement.say``)."""

import functools
from array import array

import torch

from unwall.runtime.engine import Engine

_ADVICE = (
    "Each rank takes its own part of what it has written, so the parameter has become a mixture. Write the same values on all "
    "ranks (seed their random numbers alike), or inside unwall.full_params(model, write=True), where those of rank 0 count"
)


def say_written(engine: Engine, name: str, value: torch.Tensor) -> None:
    """This rank takes a value for the parameter ``name``."""
    if engine.ranks.size > 1 and value.numel():
        engine.executor.agreement.say(_sums(value), functools.partial(_names, name), _ADVICE)


@torch.no_grad()
def _sums(value: torch.Tensor) -> "array[float]":
    """The magnitude, and two numbers from 1 to 3 that say how positive and negative values are spread."""
    flat = value.detach().reshape(-1)
    flat = flat if flat.dtype in (torch.float32, torch.bfloat16, torch.float16) else flat.float()
    size, whole, half = torch.stack(
        [torch.linalg.vector_norm(flat, 1, dtype=torch.float32), *(part.sum(dtype=torch.float32) for part in (flat, flat[::2]))]
    ).tolist()
    return array("d", [size / flat.numel(), *(2.0 + part / size if size else 2.0 for part in (whole, half))])


def _names(name: str) -> list[str]:
    return [f"the mean magnitude of what was written to {name}", *[f"a checksum of what was written to {name}"] * 2]
