"""The norm of all gradients, over groups and ranks, without copying them."""

from collections.abc import Iterable

import torch

from unwall.shards.squares import SquareSum, add_measured
from unwall.tiers.workers import shared_pool


def total_squares(pieces: Iterable[torch.Tensor], device: torch.device) -> torch.Tensor:
    """``[sum of squares, count of elements that are not finite]`` in float64 on ``device``.

    A piece without dimensions is a sum of squares already, measured earlier. On the host the bits depend on the elements and
    the order of the pieces alone.
    """
    measured = [piece if piece.dim() == 0 else SquareSum(piece, shared_pool) for piece in pieces]
    total = torch.zeros(2, dtype=torch.float64, device=device)
    for entry in measured:
        if isinstance(entry, SquareSum):
            entry.add_to(total)
        else:
            add_measured(entry, total)
    return total


def clip_factor(norm: torch.Tensor, limit: float) -> torch.Tensor:
    """What gradients are multiplied with so that their norm stays within ``limit`` (as ``clip_grad_norm_`` does it)."""
    return torch.clamp(limit / (norm + 1e-6), max=1.0)
