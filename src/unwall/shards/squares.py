"""The sum of squares of a tensor, of which norms are made: one way to measure it, on its way to a tier or at the step."""

from collections.abc import Callable

import torch

from unwall.native.pool import SumSquares, WorkerPool
from unwall.native.ticket import NativeTicket
from unwall.shards.group import Group
from unwall.tiers.host import DTYPES


class SquareSum:
    """A sum of squares that is being measured: by native workers (``pool``), or queued on the device.

    The bits depend on the elements alone, not on threads, instruction sets, or when it is measured.
    """

    def __init__(self, values: torch.Tensor, pool: Callable[[], WorkerPool]) -> None:
        self._measured: torch.Tensor | tuple[NativeTicket, SumSquares]
        if values.device.type == "cpu" and values.dtype in DTYPES:
            kind = DTYPES[values.dtype]
            self._measured = pool().sum_squares(values.data_ptr(), values.numel(), kind, keep=(values,))
        else:
            norm = torch.linalg.vector_norm(values, dtype=torch.promote_types(values.dtype, torch.float32)).double()
            self._measured = norm * norm

    def result(self) -> torch.Tensor | tuple[float, int]:
        """Waits for the workers: the sum, and how many elements are not finite. Of what is queued on the device the sum alone,
        in float64, without dimensions."""
        if isinstance(self._measured, torch.Tensor):
            return self._measured
        ticket, result = self._measured
        ticket.wait()
        return result.sum, result.nonfinite

    def tensor(self) -> torch.Tensor:
        """The sum alone, in float64, without dimensions. Waits for the workers."""
        found = self.result()
        return found if isinstance(found, torch.Tensor) else torch.tensor(found[0], dtype=torch.float64)


def counted_part(own: torch.Tensor, group: Group, rank: int) -> torch.Tensor:
    """The part of an owned run that this rank counts: each element of the model is counted on exactly one rank."""
    numel = group.layout.shard_numel
    return own.narrow(0, rank * numel - group.own_start, numel)
