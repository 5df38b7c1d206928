"""Sparse attention over queries, keys and values."""

import functools
from typing import Any

import torch

from unwall.sparse.block_mask import block_mask_of
from unwall.sparse.blockwise import blockwise_attention, rows_of
from unwall.sparse.patterns import MaskFunction, Pattern, is_constant, mask_function


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
    False where the heads of a pattern are to be all like its first one.
    """
    _check(q, k, v, key_mask)
    batch, heads = q.shape[0], 1 if per_head is False else q.shape[1]
    mask = combined(mask_function(pattern, max(q.shape[2], k.shape[2]), q.device), causal, key_mask)
    if q.device.type == "cpu":
        return blockwise_attention(q, k, v, rows_of(mask, batch, heads, q.shape[2], k.shape[2], q.device), scale)
    shape = (batch, heads, q.shape[2], k.shape[2], q.device)
    # A function of the user's may look at tensors that change: it is asked each time.
    known = key_mask is None and is_constant(pattern)
    blocks = _known_blocks(pattern, causal, *shape) if known else block_mask_of(mask, *shape)
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


@functools.lru_cache(maxsize=32)
def _known_blocks(pattern: Pattern, causal: bool, batch: int, heads: int, queries: int, keys: int, device: torch.device) -> Any:
    """Every layer and every step asks for the same."""
    mask = combined(mask_function(pattern, max(queries, keys), device), causal, None)
    return block_mask_of(mask, batch, heads, queries, keys, device)


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
