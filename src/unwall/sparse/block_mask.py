"""A mask function as torch's BlockMask, looked at a few rows of blocks at a time: all pairs of tokens at once would not fit."""

from typing import Any

import torch

from unwall.sparse.blockwise import pairs_of
from unwall.sparse.patterns import MaskFunction

BLOCK = 128
"""Tokens per block of flex_attention."""
PAIRS = 1 << 26
"""How many pairs of tokens are looked at at once."""


def block_mask_of(mask: MaskFunction, batch: int, heads: int, queries: int, keys: int, device: torch.device) -> Any:
    """For ``flex_attention``, by sample and by head where the mask depends on them."""
    from torch.nn.attention.flex_attention import BlockMask

    some, every = _blocks(mask, batch, heads, queries, keys, device)
    return BlockMask.from_kv_blocks(
        *_listed(some & ~every), *_listed(every), BLOCK_SIZE=BLOCK, mask_mod=mask, seq_lengths=(queries, keys)
    )


def _blocks(
    mask: MaskFunction, batch: int, heads: int, queries: int, keys: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """[batch or 1, heads or 1, blocks of queries, blocks of keys]: whether any of its pairs is seen, and whether all are."""
    columns, rows = -(-keys // BLOCK), -(-queries // BLOCK)
    k = torch.arange(columns * BLOCK, device=device)
    some, every = [], []
    differ = pairs_of(mask, batch, heads, k[:1], k[:1]).numel()  # samples and heads that do
    step = max(1, PAIRS // (differ * len(k) * BLOCK))
    for start in range(0, rows, step):
        q = torch.arange(start * BLOCK, min(start + step, rows) * BLOCK, device=device)
        # Positions beyond the end are looked at as the last one, and do not count as seen.
        seen = pairs_of(mask, batch, heads, q.clamp(max=queries - 1), k.clamp(max=keys - 1))
        seen = seen & (q < queries)[:, None] & (k < keys)
        seen = seen.reshape(*seen.shape[:2], -1, BLOCK, columns, BLOCK)
        some.append(seen.any(-1).any(3))
        every.append(seen.all(-1).all(3))
    return torch.cat(some, 2), torch.cat(every, 2)


def _listed(chosen: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """How many blocks of keys each row has, and which: those first, the others after them."""
    order = torch.argsort(chosen.int(), dim=-1, descending=True, stable=True)
    return chosen.sum(-1).int(), order.int()
