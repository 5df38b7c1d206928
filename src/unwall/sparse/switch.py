"""A transformers model whose attention is sparse: through its registries, so causality, padding and packing stay its own."""

import itertools
from typing import Any

import torch
from torch import nn

from unwall.sparse.attention import compiled_flex
from unwall.sparse.block_mask import block_mask_of
from unwall.sparse.blockwise import Row, blockwise_attention, rows_of
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

    before = _config(model)._attn_implementation
    name, sparse = f"unwall_sparse_{next(_numbers)}", _Sparse(pattern, _heads_of(model))
    AttentionInterface.register(name, sparse.attention)
    AttentionMaskInterface.register(name, sparse.mask)
    choose(name)
    dense = _not_switched(model, name)
    if dense:
        choose(before)
        raise ValueError(
            f"{', '.join(dense)} would stay dense: the attention does not go through transformers' AttentionInterface. Call "
            "unwall.sparse.attention(q, k, v, pattern) in it instead"
        )
    return model


def _config(model: Any) -> Any:
    return model.config


def _heads_of(model: nn.Module) -> int:
    """Heads of queries, as far as the config says: of the text, where there are several parts."""
    found: int = getattr(_config(model).get_text_config(), "num_attention_heads", 1)
    return found


def _not_switched(model: nn.Module, name: str) -> list[str]:
    """The classes of what kept its own attention, although it is a model of transformers: they only log that."""
    parts: list[Any] = [part for part in model.modules() if hasattr(part, "set_attn_implementation")]
    return sorted({type(part).__name__ for part in parts if part.config._attn_implementation != name})


class Rows(list[Row]):
    """What the layers of a model on the host get as their mask."""

    ndim = 4
    """It is whole: where ``generate`` makes it ahead (static caches), nothing is to be added to it."""


UNKNOWN = ("softcap", "s_aux", "position_bias", "head_mask")
"""What a layer may ask of its attention beside the mask. Leaving it out would be another model."""


class _Sparse:
    """One pattern in transformers' registries. ``heads``: of the model."""

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
        attention_mask: torch.Tensor | Rows | None = None,
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

        if isinstance(attention_mask, Rows):
            return attention_mask
        tokens = int(max(kv_length + kv_offset, q_length + q_offset))  # static caches count in tensors
        both = and_masks(mask_function, as_function(self._pattern, tokens, device))
        padding = prepare_padding_mask(attention_mask, kv_length, kv_offset)
        if padding is not None:
            both = and_masks(both, padding_mask_function(padding.bool()))
        both = add_offsets_to_mask_function(both, q_offset, kv_offset)
        device = torch.device(device)
        if device.type == "cpu":
            return Rows(rows_of(both, batch_size, self._heads, q_length, kv_length, device))
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
        **others: Any,
    ) -> tuple[torch.Tensor, None]:
        """As transformers calls it; the output has tokens before heads."""
        if attention_mask is None:
            raise RuntimeError(f"{type(module).__name__} was called without a mask: sparse attention needs the model's own")
        unknown = [name for name in UNKNOWN if others.get(name) is not None]
        if unknown:
            raise RuntimeError(
                f"{type(module).__name__} asks its attention for {', '.join(unknown)}, which sparse attention does not have: "
                "switch that off in the config, or use a model without it"
            )
        self._check_heads(module, query, attention_mask)
        if query.device.type == "cpu":
            found = blockwise_attention(query, key, value, attention_mask, scaling, dropout)
        elif dropout:
            raise RuntimeError("flex_attention has no dropout: set the config's attention_dropout to 0")
        else:
            shared = key.shape[1] != query.shape[1]
            found = compiled_flex()(query, key, value, block_mask=attention_mask, scale=scaling, enable_gqa=shared)
        return found.transpose(1, 2).contiguous(), None

    def _check_heads(self, module: nn.Module, query: torch.Tensor, attention_mask: Any) -> None:
        """Layouts that differ by head need all heads on one rank."""
        masks = attention_mask[0].mask if isinstance(attention_mask, Rows) else attention_mask.kv_num_blocks
        if masks.shape[1] not in (1, query.shape[1]):
            raise RuntimeError(
                f"{type(module).__name__} has {query.shape[1]} heads here, and the pattern differs by head over "
                f"{masks.shape[1]}: with tensor parallelism use one that is the same for all heads"
            )
