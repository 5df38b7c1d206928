"""Attention over chosen blocks wherever PyTorch runs, with a backward.

[Note: rows of blocks]
Queries go in blocks. For each, the mask says which blocks of keys any of them sees; those are gathered and attended to with the
rest of the mask. The work is that of the blocks that are seen; a mask that differs by head or sample counts a block that one of
them sees for all.
"""

from typing import NamedTuple

import torch
from torch.nn import functional

from unwall.sparse.patterns import MaskFunction

BLOCK = 128


class Row(NamedTuple):
    """A block of queries and the keys it sees."""

    start: int
    end: int
    keys: torch.Tensor
    """Positions of the keys that are gathered."""
    mask: torch.Tensor
    """[batch or 1, heads or 1, queries, keys]: who sees whom."""
    blind: torch.Tensor | None
    """[batch or 1, heads or 1, queries, 1]: queries that see nothing. Their output is zero. None: there are none."""


def pairs_of(mask: MaskFunction, batch: int, heads: int, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """[batch or 1, heads or 1, queries, keys]: who sees whom. What a mask does not look at its result does not have either, so
    it is known whether samples and heads differ."""
    b = torch.arange(batch, device=keys.device)[:, None, None, None]
    h = torch.arange(heads, device=keys.device)[:, None, None]
    seen = mask(b, h, queries[:, None], keys)
    if not isinstance(seen, torch.Tensor) or seen.dtype is not torch.bool:
        got = seen.dtype if isinstance(seen, torch.Tensor) else type(seen).__name__
        raise TypeError(f"a mask function gives a bool tensor: where a query attends to a key, got {got}")
    seen = seen[(None,) * (4 - seen.dim())]
    return seen.expand(*seen.shape[:2], len(queries), len(keys))


def rows_of(
    mask: MaskFunction, batch: int, heads: int, queries: int, keys: int, device: torch.device, block: int = BLOCK
) -> list[Row]:
    """What each block of queries sees, by sample and by head where the mask depends on them."""
    every = torch.arange(keys, device=device)
    found = []
    for start in range(0, queries, block):
        end = min(start + block, queries)
        seen = pairs_of(mask, batch, heads, torch.arange(start, end, device=device), every)
        some = functional.pad(seen.any(0).any(0).any(0), (0, -keys % block)).view(-1, block).any(-1)
        chosen = every[some.repeat_interleave(block)[:keys]]
        if not len(chosen):
            chosen = every[:1]  # nobody sees anything: something to attend to, which does not count
        part = seen[..., chosen]
        blind = ~part.any(-1, keepdim=True)
        found.append(Row(start, end, chosen, part | blind, blind if bool(blind.any()) else None))
    return found


def blockwise_attention(
    q: torch.Tensor,  # batch, heads, queries, width
    k: torch.Tensor,  # batch, heads (or fewer, shared), keys, width
    v: torch.Tensor,
    rows: list[Row],
    scale: float | None = None,
    dropout: float = 0.0,
) -> torch.Tensor:
    """Attention over the blocks of ``rows``."""
    parts = []
    for row in rows:
        keys, values = k.index_select(2, row.keys), v.index_select(2, row.keys)
        part = functional.scaled_dot_product_attention(
            q[:, :, row.start : row.end], keys, values, attn_mask=row.mask, scale=scale, dropout_p=dropout,
            enable_gqa=k.shape[1] != q.shape[1],
        )  # fmt: skip
        parts.append(part if row.blind is None else part.masked_fill(row.blind, 0.0))
    return torch.cat(parts, dim=2)
