"""What torch's functions do with a parameter that lies in tiles. See [Note: tiled operators] in runtime/tiling.py."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from unwall.nn.linear_cross_entropy import Options, chunk_by_chunk
from unwall.runtime.tile_views import TileView, getter, part_of
from unwall.runtime.tiled_embedding import Lookup, lookup
from unwall.runtime.tiled_loss import TiledLoss, losses
from unwall.runtime.tiled_product import Product, Stretch, product
from unwall.runtime.tiling import Tiling

T = torch.Tensor


def compute(tiling: Tiling, func: Any, args: Any, kwargs: Any) -> Any:
    """Calls ``func``, of whose arguments at least one lies in tiles. RuntimeError where it needs that one whole."""
    known = _FUNCTIONS.get(func) or _grouped_of(func)
    if known is not None:
        done = known(tiling, *args, **kwargs)
        if done is not None:
            return done
    found = (part_of(arg) for arg in (*args, *kwargs.values()) if _is_tiled(tiling, arg))
    part = next((part for part in found if part is not None), None)
    name = getattr(func, "__name__", str(func))
    if part is None:
        raise RuntimeError(f"{name} needs a parameter that lies in tiles whole: keep it whole with Plan(tiles=1)")
    raise tiling.refusal(part.param, name)


def _is_tiled(tiling: Tiling, value: Any) -> bool:
    return isinstance(value, TileView) or (isinstance(value, nn.Parameter) and tiling.has(value))


def _autocast(device: torch.device) -> torch.dtype | None:
    """What products are computed in where autocast is on."""
    return torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None


def _linear(tiling: Tiling, input: T, weight: T, bias: T | None = None) -> T | None:
    part = part_of(weight)
    if _is_tiled(tiling, input) or _is_tiled(tiling, bias) or part is None or part.experts is not None:
        return None
    rows = input.numel() // max(1, input.shape[-1])
    job = Product(tiling, part.param, [Stretch(0, rows, part.start, part.stop)], part.flipped, _autocast(input.device))
    if part.flipped and bias is not None:
        found = product(job, input)
        return found + bias.to(found.dtype)
    return product(job, input, bias)


def _matmul(tiling: Tiling, input: T, other: T) -> T | None:
    part = part_of(other)
    if part is None or _is_tiled(tiling, input):
        return None
    return _linear(tiling, input, TileView.make(part._replace(flipped=not part.flipped), tiling))


def _addmm(tiling: Tiling, input: T, mat1: T, mat2: T, *, beta: float = 1, alpha: float = 1) -> T | None:
    if _is_tiled(tiling, input) or (beta, alpha) != (1, 1):
        return None
    found = _matmul(tiling, mat1, mat2)
    return None if found is None else found + input.to(found.dtype)


def _embedding(
    tiling: Tiling,
    input: T,
    weight: T,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,  # noqa: ARG001
    scale_grad_by_freq: bool = False,
    sparse: bool = False,  # noqa: ARG001 (gradients are dense here)
) -> T | None:
    if max_norm is not None or not isinstance(weight, nn.Parameter) or weight.dim() != 2:
        return None
    padding = -1 if padding_idx is None else padding_idx % weight.shape[0]
    return lookup(Lookup(tiling, weight, padding, scale_grad_by_freq), input)


def _losses(tiling: Tiling, x: T, weight: T, bias: T | None, labels: T, options: Options) -> T | None:
    if _is_tiled(tiling, x) or _is_tiled(tiling, bias):
        return None
    if not isinstance(weight, nn.Parameter):  # a part of one, or its transpose
        return chunk_by_chunk(x, weight, bias, labels, options)
    return losses(TiledLoss(tiling, weight, labels, options, _autocast(x.device)), x, bias)


def _grouped(tiling: Tiling, input: T, weight: T, offs: T | None = None, bias: T | None = None, **others: Any) -> T | None:
    """The rows of ``input`` lie in the order of the experts; ``offs`` says where those of each end."""
    part = part_of(weight)
    plain = offs is not None and bias is None and all(value is None for value in others.values())
    if part is None or part.experts is None or not plain or _is_tiled(tiling, input) or input.dim() != 2:
        return None
    assert offs is not None
    ends = [0, *offs.tolist()]
    rows, stretches = part.rows, []
    for expert in range(part.experts):
        start = part.start + expert * rows
        stretches.append(Stretch(ends[expert], ends[expert + 1], start, start + rows))
    return product(Product(tiling, part.param, stretches, across=not part.flipped), input)


def _grouped_of(func: Any) -> Callable[..., T | None] | None:
    """Products with stacked experts go under several names, one of them an operator of transformers'."""
    name = getattr(func, "__name__", "")
    return _grouped if name in ("grouped_mm", "_grouped_mm", "grouped_mm_fallback") else None


def _pick(tiling: Tiling, value: T, which: Any) -> T | None:
    """One of the experts, or some that follow each other."""
    part = part_of(value)
    if part is None or part.experts is None:
        return None
    if isinstance(which, T) and which.numel() == 1 and not which.is_floating_point() and which.dtype is not torch.bool:
        which = int(which) if which.dim() == 0 else which
    first, count = 0, part.experts
    if isinstance(which, slice):
        first, last, step = which.indices(count)
        if step != 1 or last <= first:
            return None
        picked = part._replace(start=part.start + first * part.rows, stop=part.start + last * part.rows, experts=last - first)
        return TileView.make(picked, tiling)
    if not isinstance(which, int) or isinstance(which, bool):
        return None
    if not -count <= which < count:
        raise IndexError(f"index {which} is out of bounds for dimension 0 with size {count}")
    start = part.start + which % count * part.rows
    return TileView.make(part._replace(start=start, stop=start + part.rows, experts=None), tiling)


def _flip(tiling: Tiling, value: T, *dims: int) -> T | None:
    part = part_of(value)
    if part is None:
        return None
    size = len(part.shape)
    if (dims and {dim % size for dim in dims} != {size - 1, size - 2}) or (not dims and size != 2):
        return None
    return TileView.make(part._replace(flipped=not part.flipped), tiling)


def _to(tiling: Tiling, value: T, *args: Any, **kwargs: Any) -> T | None:
    """Nothing to do where it is what it should become."""
    probe = torch.empty((), dtype=value.dtype, device=value.device)
    return value if _is_tiled(tiling, value) and probe.to(*args, **kwargs) is probe else None


_FUNCTIONS: dict[Any, Callable[..., T | None]] = {
    nn.functional.linear: _linear,
    nn.functional.embedding: _embedding,
    chunk_by_chunk: _losses,
    **dict.fromkeys((torch.matmul, T.matmul, T.__matmul__, torch.mm, T.mm), _matmul),
    **dict.fromkeys((torch.addmm, T.addmm), _addmm),
    **dict.fromkeys((torch.transpose, T.transpose, T.t, torch.t, getter("T")), _flip),
    getter("mT"): lambda tiling, value: _flip(tiling, value, -1, -2),
    T.__getitem__: _pick,
    T.to: _to,
}
