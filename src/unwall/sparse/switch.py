"""A transformers model whose attention is sparse: through its registries, so causality, padding and packing stay its own."""

import itertools
from typing import Any

import torch
from torch import nn

from unwall.sparse.attention import compiled_flex
from unwall.sparse.block_mask import block_mask_of
from unwall.sparse.blockwise import blockwise_attention, rows_of
from unwall.sparse.patterns import Layout, Pattern
from unwall.sparse.patterns import mask_function as as_function

_numbers = itertools.count()


def use(model: nn.Module, pattern: Pattern) -> nn.Module:
    """Switches the attention of a transformers model to ``pattern``, in place; before or after ``unwall.shard``.

    A token sees what both the model (causality, padding, packed documents) and the pattern let it see.
    """
    choose: Any = getattr(model, "set_attn_implementation", None)
    if choose is None:
        raise ValueError(
            f"{type(model).__name__} is no transformers model: call unwall.sparse.attention(q, k, v, pattern) in its attention"
        )
    if not isinstance(pattern, Layout) and not callable(pattern):
        raise TypeError(f"a pattern is made by unwall.sparse, or a function of batch, head, query and key, got {pattern!r}")
    from transformers import AttentionInterface, AttentionMaskInterface

    heads = getattr(model.config, "num_attention_heads", 1) if getattr(pattern, "heads", 1) > 1 else 1
    name, sparse = f"unwall_sparse_{next(_numbers)}", _Sparse(pattern, heads)
    AttentionInterface.register(name, sparse.attention)
    AttentionMaskInterface.register(name, sparse.mask)
    choose(name)
    return model


class _Sparse:
    """One pattern in transformers' registries. ``heads``: how many differ."""

    def __init__(self, pattern: Pattern, heads: int) -> None:
        self._pattern = pattern
        self._heads = heads

    def mask(
        self,
        batch_size: int,
        q_length: int,
        kv_length: int,
        q_offset: int = 0,
        kv_offset: int = 0,
        *,
        mask_function: Any,
        attention_mask: torch.Tensor | None = None,
        device: torch.device | str = "cpu",
        **_: Any,
    ) -> Any:
        """What transformers passes to each layer: who sees whom by the model's own mask, its padding and the pattern."""
        from transformers.masking_utils import (
            add_offsets_to_mask_function,
            and_masks,
            padding_mask_function,
            prepare_padding_mask,
        )

        both = and_masks(mask_function, as_function(self._pattern, max(kv_length + kv_offset, q_length + q_offset), device))
        padding = prepare_padding_mask(attention_mask, kv_length, kv_offset)
        if padding is not None:
            both = and_masks(both, padding_mask_function(padding.bool()))
        both = add_offsets_to_mask_function(both, q_offset, kv_offset)
        device = torch.device(device)
        if device.type == "cpu":
            return rows_of(both, batch_size, self._heads, q_length, kv_length, device)
        return block_mask_of(both, batch_size, self._heads, q_length, kv_length, device)

    def attention(
        self,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: Any,
        scaling: float | None = None,
        dropout: float = 0.0,
        **_: Any,
    ) -> tuple[torch.Tensor, None]:
        """As transformers calls it; the output has tokens before heads."""
        if attention_mask is None:
            raise RuntimeError(f"{type(module).__name__} was called without a mask: sparse attention needs the model's own")
        if query.device.type == "cpu":
            found = blockwise_attention(query, key, value, attention_mask, scaling, dropout)
        elif dropout:
            raise RuntimeError("flex_attention has no dropout: set the config's attention_dropout to 0")
        else:
            shared = key.shape[1] != query.shape[1]
            found = compiled_flex()(query, key, value, block_mask=attention_mask, scale=scaling, enable_gqa=shared)
        return found.transpose(1, 2).contiguous(), None
