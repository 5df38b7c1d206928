"""Sparse attention over queries, keys and values."""

import functools
from typing import Any

import torch

from unwall.sparse.blockwise import blockwise_attention, rows_of
from unwall.sparse.patterns import MaskFunction, Pattern, mask_function


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    pattern: Pattern,
    *,
    causal: bool = False,
    key_mask: torch.Tensor | None = None,
    scale: float | None = None,
    per_head: bool | None = None,
) -> torch.Tensor:
    """Attention in which only what ``pattern`` allows is computed: compiled ``flex_attention`` on an accelerator, blockwise
    elsewhere.

    ``q``: [batch, heads, queries, width]; ``k`` and ``v`` may have fewer heads, each shared by as many of ``q``. ``causal``: no
    token sees a later one. ``key_mask``: [batch, keys], False for padding; a query that sees nothing gives zeros. ``per_head``:
    a mask function of your own differs by head (known of unwall's patterns).
    """
    _check(q, k, v, key_mask)
    heads = q.shape[1] if (getattr(pattern, "heads", 1) > 1 if per_head is None else per_head) else 1
    batch = 1 if key_mask is None else q.shape[0]
    mask = combined(mask_function(pattern, max(q.shape[2], k.shape[2]), q.device), causal, key_mask)
    if q.device.type == "cpu":
        return blockwise_attention(q, k, v, rows_of(mask, batch, heads, q.shape[2], k.shape[2], q.device), scale)
    blocks = compiled_block_mask()(
        mask, batch if batch > 1 else None, heads if heads > 1 else None, q.shape[2], k.shape[2], device=str(q.device)
    )
    found: torch.Tensor = compiled_flex()(q, k, v, block_mask=blocks, scale=scale, enable_gqa=k.shape[1] != q.shape[1])
    return found


def combined(mask: MaskFunction, causal: bool, key_mask: torch.Tensor | None) -> MaskFunction:
    """A mask function, causal and without padding."""
    if not causal and key_mask is None:
        return mask

    def both(b: torch.Tensor, h: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        seen = mask(b, h, query, key)
        if causal:
            seen = seen & (query >= key)
        return seen if key_mask is None else seen & key_mask[b, key]

    return both


@functools.cache
def compiled_flex() -> Any:
    """torch's flex_attention, compiled: without that it would compute all of the scores."""
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=False)


@functools.cache
def compiled_block_mask() -> Any:
    """torch's create_block_mask, compiled: without that it would hold all pairs of tokens."""
    from torch.nn.attention.flex_attention import create_block_mask

    return torch.compile(create_block_mask, dynamic=False)


def _check(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, key_mask: torch.Tensor | None) -> None:
    same = q.dim() == k.dim() == v.dim() == 4 and k.shape[:3] == v.shape[:3]
    if not same or q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in (q, k, v))
        raise ValueError(f"q, k and v are [batch, heads, tokens, width], k and v alike, got {shapes}")
    if q.shape[1] % k.shape[1]:
        raise ValueError(f"{q.shape[1]} heads of queries cannot share {k.shape[1]} heads of keys evenly")
    if key_mask is not None and (key_mask.dtype is not torch.bool or key_mask.shape != (k.shape[0], k.shape[2])):
        got = f"{key_mask.dtype} {tuple(key_mask.shape)}"
        raise ValueError(f"key_mask is a bool tensor of [batch, keys] ({k.shape[0]}, {k.shape[2]}), got {got}")
