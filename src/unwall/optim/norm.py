"""The norm of all gradients, over groups and ranks, without copying them."""

import math
from collections.abc import Iterable

import torch

from unwall.shards.squares import SquareSum
from unwall.tiers.workers import shared_pool


def total_squares(pieces: Iterable[torch.Tensor], device: torch.device, count: bool = True) -> torch.Tensor:
    """``[sum of squares, count of elements that are not finite]`` in float64 on ``device``; where nobody asks for the ``count``
    it may be missing.

    A piece without dimensions is a sum of squares already, measured earlier. On the host the bits depend on the elements and
    the order of the pieces alone.
    """
    measured = [piece if piece.dim() == 0 else SquareSum(piece, shared_pool) for piece in pieces]
    found = [entry.result() if isinstance(entry, SquareSum) else entry for entry in measured]
    if any(isinstance(entry, torch.Tensor) and entry.is_cuda for entry in found):
        sums = (torch.tensor(entry[0], dtype=torch.float64) if isinstance(entry, tuple) else entry for entry in found)
        return _on_device(list(sums), device, count)
    total, nonfinite = 0.0, 0
    for entry in found:
        if isinstance(entry, torch.Tensor):
            value = float(entry)
            entry = value, 0 if math.isfinite(value) else 1
        total, nonfinite = total + entry[0], nonfinite + entry[1]
    return torch.tensor([total, float(nonfinite)], dtype=torch.float64, device=device)


def _on_device(sums: list[torch.Tensor], device: torch.device, count: bool) -> torch.Tensor:
    """The same of sums of squares, with a few launches for all of them. Nothing is waited for. In one order, wherever they were
    measured."""
    if len(sums) == 1 and not count:
        return sums[0].to(device, torch.float64).reshape(1)
    every = torch.stack([value.to(device, torch.float64) for value in sums])
    return torch.stack([every.sum(), (~every.isfinite()).sum(dtype=torch.float64)])


def total_powers(pieces: Iterable[torch.Tensor], order: float, device: torch.device) -> torch.Tensor:
    """The same for another norm than that of order 2: the sum of powers or, for the maximum norm, the maximum."""
    total = torch.zeros(2, dtype=torch.float64, device=device)
    for piece in pieces:
        wide = torch.promote_types(piece.dtype, torch.float32)
        norm = torch.linalg.vector_norm(piece, order, dtype=wide).double().to(device)
        total[0] = torch.maximum(total[0], norm) if math.isinf(order) else total[0] + norm.pow(order)
        total[1] += (~norm.isfinite()).double()
    return total


def check_order(order: float) -> float:
    """The order of a norm. ValueError for what is none."""
    order = float(order)
    if not order > 0:
        raise ValueError(f"norm_type is a positive number or inf, got {order}")
    return order


def norm_of(total: torch.Tensor, order: float) -> torch.Tensor:
    """From what the functions above give, summed over the ranks."""
    return total[0].sqrt() if order == 2.0 else total[0] if math.isinf(order) else total[0].pow(1.0 / order)


def clip_factor(norm: torch.Tensor, limit: float) -> torch.Tensor:
    """What gradients are multiplied with so that their norm stays within ``limit`` (as ``clip_grad_norm_`` does it)."""
    return (norm + 1e-6).reciprocal_().mul_(limit).clamp_(max=1.0)  # that is how torch divides a number by a tensor
