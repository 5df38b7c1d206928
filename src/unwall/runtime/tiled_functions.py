"""What torch's functions do with a parameter that lies in tiles. See [Note: tiled operators] in runtime/tiling.py."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from unwall.runtime.tiled_embedding import Lookup, lookup
from unwall.runtime.tiled_product import Product, Stretch, product
from unwall.runtime.tiling import Tiling

T = torch.Tensor


def compute(tiling: Tiling, func: Any, args: Any, kwargs: Any) -> Any:
    """Calls ``func``, of whose arguments at least one lies in tiles. RuntimeError where it needs that one whole."""
    known = _FUNCTIONS.get(func)
    if known is not None:
        done = known(tiling, *args, **kwargs)
        if done is not None:
            return done
    param = next(arg for arg in (*args, *kwargs.values()) if isinstance(arg, nn.Parameter))
    raise tiling.refusal(param, getattr(func, "__name__", str(func)))


def _is_tiled(tiling: Tiling, value: Any) -> bool:
    return isinstance(value, nn.Parameter) and tiling.has(value)


def _autocast(device: torch.device) -> torch.dtype | None:
    """What products are computed in where autocast is on."""
    return torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None


def _linear(tiling: Tiling, input: T, weight: T, bias: T | None = None) -> T | None:
    if _is_tiled(tiling, input) or _is_tiled(tiling, bias) or weight.dim() != 2:
        return None
    assert isinstance(weight, nn.Parameter)
    rows = input.numel() // max(1, input.shape[-1])
    job = Product(tiling, weight, [Stretch(0, rows, 0, weight.shape[0])], False, _autocast(input.device))
    return product(job, input, bias)


def _matmul(tiling: Tiling, input: T, other: T) -> T | None:
    if _is_tiled(tiling, input) or other.dim() != 2:
        return None
    assert isinstance(other, nn.Parameter)
    rows = input.numel() // max(1, input.shape[-1])
    return product(Product(tiling, other, [Stretch(0, rows, 0, other.shape[0])], True, _autocast(input.device)), input)


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
    if max_norm is not None:
        return None
    assert isinstance(weight, nn.Parameter)
    padding = -1 if padding_idx is None else padding_idx % weight.shape[0]
    return lookup(Lookup(tiling, weight, padding, scale_grad_by_freq), input)


def _to(tiling: Tiling, param: T, *args: Any, **kwargs: Any) -> T | None:
    """Nothing to do where it is what it should become."""
    probe = torch.empty((), dtype=param.dtype, device=param.device)
    same = probe.to(*args, **kwargs)
    return param if same is probe and _is_tiled(tiling, param) else None


_FUNCTIONS: dict[Any, Callable[..., T | None]] = {
    nn.functional.linear: _linear,
    nn.functional.embedding: _embedding,
    **dict.fromkeys((torch.matmul, T.matmul, T.__matmul__, torch.mm, T.mm), _matmul),
    **dict.fromkeys((torch.addmm, T.addmm), _addmm),
    T.to: _to,
}
