"""A mask function as torch's BlockMask, looked at a few rows of blocks at a time: all pairs of tokens at once would not fit."""

from typing import Any

import torch

from unwall.sparse.patterns import MaskFunction

BLOCK = 128
"""Tokens per block of flex_attention."""
PAIRS = 1 << 26
"""How many pairs of tokens are looked at at once."""


def block_mask_of(mask: MaskFunction, batch: int, heads: int, queries: int, keys: int, device: torch.device) -> Any:
    """For ``flex_attention``. ``batch`` and ``heads`` are 1 where the mask does not depend on them."""
    from torch.nn.attention.flex_attention import BlockMask

    some, every = _blocks(mask, batch, heads, queries, keys, device)
    return BlockMask.from_kv_blocks(
        *_listed(some & ~every), *_listed(every), BLOCK_SIZE=BLOCK, mask_mod=mask, seq_lengths=(queries, keys)
    )


def _blocks(
    mask: MaskFunction, batch: int, heads: int, queries: int, keys: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """[batch, heads, blocks of queries, blocks of keys]: whether any of its pairs is seen, and whether all are."""
    b = torch.arange(batch, device=device)[:, None, None, None]
    h = torch.arange(heads, device=device)[:, None, None]
    columns, rows = -(-keys // BLOCK), -(-queries // BLOCK)
    k = torch.arange(columns * BLOCK, device=device)
    some, every = [], []
    step = max(1, PAIRS // (batch * heads * len(k) * BLOCK))
    for start in range(0, rows, step):
        q = torch.arange(start * BLOCK, min(start + step, rows) * BLOCK, device=device)[:, None]
        # Positions beyond the end are looked at as the last one, and do not count as seen.
        seen = mask(b, h, q.clamp(max=queries - 1), k.clamp(max=keys - 1)) & (q < queries) & (k < keys)
        seen = seen.expand(batch, heads, len(q), len(k)).reshape(batch, heads, -1, BLOCK, columns, BLOCK)
        some.append(seen.any(-1).any(3))
        every.append(seen.all(-1).all(3))
    return torch.cat(some, 2), torch.cat(every, 2)


def _listed(chosen: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """How many blocks of keys each row has, and which: those first, the others after them."""
    order = torch.argsort(chosen.int(), dim=-1, descending=True, stable=True)
    return chosen.sum(-1).int(), order.int()
