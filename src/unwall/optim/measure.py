"""What an optimizer measures over all of its gradients, on every rank and tier: each element is counted on exactly one rank."""

import math
from collections.abc import Iterator, Sequence

import torch

from unwall.optim.norm import total_powers, total_squares
from unwall.runtime.engine import Engine
from unwall.shards.dimensions import greatest
from unwall.shards.squares import counted_part

Held = tuple[Engine, int, set[int]]
"""A group with gradients, and which of its parameters have one."""


def measure(engines: Sequence[Engine], held: list[Held], order: float, count: bool = True) -> torch.Tensor:
    """``[sum of squares (or powers, or the maximum), not finite]`` over all ranks, the loss scale still in. The second may be
    missing where nobody asks for that ``count``."""
    found = []
    for engine in engines:
        device = engine.device.device
        every = sorted({group.copies for group in engine.groups})
        if order == 2.0 and every == [1] and engine.everyone.size == 1:  # as few launches as that takes
            found.append(total_squares(_pieces(engine, held, measured=True), device, count))
            continue
        part = torch.zeros(2, dtype=torch.float64, device=device)
        for copies in every:
            some = [one for one in held if one[0] is engine and engine.groups[one[1]].copies == copies]
            if order == 2.0:
                part += total_squares(_pieces(engine, some, measured=True), device) / copies
            elif math.isinf(order):
                part = torch.maximum(part, total_powers(_pieces(engine, some, measured=False), order, device))
            else:
                part += total_powers(_pieces(engine, some, measured=False), order, device) / copies
        if math.isinf(order):
            found.append(engine.others.maximum(_maximum(engine, part)))
        else:
            found.append(engine.others.sum(engine.executor.agreement.sum(part)))
    total = found[0]
    for part in found[1:]:
        part = part.to(total.device)
        total = torch.maximum(total, part) if math.isinf(order) else total + part
    return total


def norm_at_once(engines: Sequence[Engine], held: list[Held]) -> torch.Tensor | None:
    """The norm where a rank alone has all gradients in one tensor on its accelerator, with one launch.

    The bits are those of the long way: it squares the norm in float64, which loses nothing of a float32, and takes the root."""
    if len(held) != 1 or len(engines) != 1:
        return None
    engine, index, slots = held[0]
    gradient = engine.gradients[index]
    if engine.device.device.type != "cuda" or engine.everyone.size > 1 or gradient.square_sum is not None:
        return None
    if slots != gradient.present or any(group.copies > 1 for group in engine.groups):
        return None
    part = counted_part(gradient.read(), engine.groups[index], engine.ranks.rank)
    if part.device.type != "cuda" or torch.promote_types(part.dtype, torch.float32) is not torch.float32:
        return None
    norm: torch.Tensor = torch.linalg.vector_norm(part, dtype=torch.float32)
    return norm


def _maximum(engine: Engine, part: torch.Tensor) -> torch.Tensor:
    """The greatest of the ranks' parts, element by element."""
    if engine.ranks.size == 1:
        return part
    engine.together("clip_grad_norm_ with the maximum norm")
    return greatest(engine.ranks, part)


def _pieces(engine: Engine, held: list[Held], measured: bool) -> Iterator[torch.Tensor]:
    """This rank's part of each gradient. ``measured``: its sum of squares where that is known."""
    for owner, index, slots in held:
        gradient = engine.gradients[index]
        if owner is not engine:
            continue
        gradient.check()
        if not gradient.held:
            continue
        mine = slots == gradient.present  # and not also parameters of another optimizer
        if measured and mine and gradient.square_sum is not None:
            yield gradient.square_sum  # measured on its way to the host
            continue
        group = engine.groups[index]
        part = counted_part(gradient.read(), group, engine.ranks.rank)
        if mine:
            yield part
            continue
        for segment in group.layout.segments(engine.ranks.rank):
            if segment.slot in slots:
                yield part[segment.shard_start : segment.shard_start + segment.numel]
