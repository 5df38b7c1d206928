"""A part of a parameter that lies in tiles, or its transpose, as code gets it that picks one of several stacked experts.

[Note: tile views]
``self.gate_up_proj[expert]`` would fetch the expert's tile, and nothing would say when it may go. So what is picked is only
noted: a view without values, that a product then reads tile by tile. It looks like the tensor that it stands for (shape, dtype,
device); anything that needs its values is an error, as for the parameter itself.
"""

from typing import Any, NamedTuple

import torch
from torch import nn


class Part(NamedTuple):
    """Which part of a parameter is meant."""

    param: nn.Parameter
    start: int
    """First row, of the parameter seen as a matrix."""
    stop: int
    experts: int | None
    """How many matrices are stacked there. None: it is one matrix."""
    flipped: bool
    """The transpose of each matrix is meant."""

    @property
    def rows(self) -> int:
        """Of each matrix."""
        return (self.stop - self.start) // (self.experts or 1)

    @property
    def shape(self) -> torch.Size:
        matrix = (self.rows, int(self.param.shape[-1]))
        matrix = matrix[::-1] if self.flipped else matrix
        return torch.Size(matrix if self.experts is None else (self.experts, *matrix))


class TileView(torch.Tensor):
    """See [Note: tile views]."""

    part: Part
    tiling: Any
    knows_chunk_by_chunk = True
    """See nn/linear_cross_entropy.py."""

    @staticmethod
    def make(part: Part, tiling: Any) -> "TileView":
        with torch._C.DisableTorchFunctionSubclass():
            nothing = part.param.detach()[(0,) * part.param.dim()]  # the placeholder
            view: TileView = nothing.expand(part.shape).as_subclass(TileView)
        view.part, view.tiling = part, tiling
        return view

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        from unwall.runtime.tiled_functions import compute  # which makes views

        kwargs = kwargs or {}
        view = next(arg for arg in (*args, *kwargs.values()) if isinstance(arg, TileView))
        if func in _DESCRIBED:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        return compute(view.tiling, func, args, kwargs)


def part_of(value: Any) -> Part | None:
    """What a parameter in tiles, or a view of it, stands for."""
    if isinstance(value, TileView):
        return value.part
    if not isinstance(value, nn.Parameter) or value.dim() not in (2, 3):
        return None
    rows = int(value.shape[:-1].numel())
    return Part(value, 0, rows, None if value.dim() == 2 else int(value.shape[0]), False)


def getter(name: str) -> Any:
    """What torch calls where an attribute of a tensor is read."""
    return getattr(torch.Tensor, name).__get__


_T = torch.Tensor
_DESCRIBED = {
    *map(getter, ("shape", "dtype", "device", "requires_grad", "ndim", "is_cuda", "is_cpu", "layout", "is_leaf", "grad_fn")),
    *map(getter, ("is_meta", "is_sparse", "is_quantized")),
    *(_T.size, _T.dim, _T.numel, _T.is_floating_point, _T.is_complex, _T.get_device, _T.data_ptr, _T.__len__),
}
"""Answered by the stand-in. Its address is aligned, which is what those ask who ask for it."""
