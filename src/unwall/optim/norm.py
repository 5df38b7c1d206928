"""The norm of all gradients, over groups and ranks, without copying them."""

from collections.abc import Iterable

import torch

from unwall.optim.workers import DTYPES, shared_pool
from unwall.shards.collectives import Ranks


def sum_squares(pieces: Iterable[torch.Tensor], device: torch.device) -> torch.Tensor:
    """``[sum of squares, count of elements that are not finite]`` in float64 on ``device``.

    On the host the bits depend on the pieces alone, not on threads or instruction sets.
    """
    total = torch.zeros(2, dtype=torch.float64, device=device)
    jobs = []
    for piece in pieces:
        if piece.device.type == "cpu" and piece.dtype in DTYPES:
            jobs.append(shared_pool().sum_squares(piece.data_ptr(), piece.numel(), DTYPES[piece.dtype], keep=(piece,)))
        else:
            norm = torch.linalg.vector_norm(piece, dtype=torch.promote_types(piece.dtype, torch.float32)).double()
            total[0] += norm * norm
            total[1] += (~norm.isfinite()).double()
    for ticket, result in jobs:
        ticket.wait()
        total[0] += result.sum
        total[1] += result.nonfinite
    return total


def over_ranks(total: torch.Tensor, ranks: Ranks) -> torch.Tensor:
    """The same, summed over the ranks."""
    return ranks.all_reduce_sum(total)


def clip_factor(norm: torch.Tensor, limit: float) -> torch.Tensor:
    """What gradients are multiplied with so that their norm stays within ``limit`` (as ``clip_grad_norm_`` does it)."""
    return torch.clamp(limit / (norm + 1e-6), max=1.0)
