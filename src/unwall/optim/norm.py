"""The norm of all gradients, over groups and ranks, without copying them."""

from collections.abc import Iterable

import torch

from unwall.native.pool import SumSquares
from unwall.native.ticket import NativeTicket
from unwall.optim.workers import shared_pool
from unwall.tiers.host import DTYPES


def sum_squares(pieces: Iterable[torch.Tensor], device: torch.device) -> torch.Tensor:
    """``[sum of squares, count of elements that are not finite]`` in float64 on ``device``.

    A piece without dimensions is a sum of squares already, measured earlier. On the host the bits depend on the elements and
    the order of the pieces alone, not on threads, instruction sets, or when a piece was measured.
    """
    measured: list[torch.Tensor | tuple[NativeTicket, SumSquares]] = []
    for piece in pieces:
        if piece.dim() == 0:
            measured.append(piece)
        elif piece.device.type == "cpu" and piece.dtype in DTYPES:
            measured.append(shared_pool().sum_squares(piece.data_ptr(), piece.numel(), DTYPES[piece.dtype], keep=(piece,)))
        else:
            norm = torch.linalg.vector_norm(piece, dtype=torch.promote_types(piece.dtype, torch.float32)).double()
            measured.append(norm * norm)
    total = torch.zeros(2, dtype=torch.float64, device=device)
    for entry in measured:
        if isinstance(entry, torch.Tensor):
            total[0] += entry
            total[1] += (~entry.isfinite()).double()
        else:
            ticket, result = entry
            ticket.wait()
            total[0] += result.sum
            total[1] += result.nonfinite
    return total


def clip_factor(norm: torch.Tensor, limit: float) -> torch.Tensor:
    """What gradients are multiplied with so that their norm stays within ``limit`` (as ``clip_grad_norm_`` does it)."""
    return torch.clamp(limit / (norm + 1e-6), max=1.0)
