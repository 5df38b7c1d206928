"""The reference workload: a Llama-shaped decoder in plain PyTorch, its first weights and its tokens."""

import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils.checkpoint import checkpoint

from bench.shapes import Shape

ADAMW: dict[str, Any] = {"lr": 1e-4, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
"""Given to every engine in full, because their defaults differ."""
COMPUTE_DTYPE = torch.bfloat16
VARIANTS = ("recompute", "compile")
"""Options of the workload, 0 or 1: blocks are recomputed in backward (1 unless said otherwise), and compiled (0)."""


def initial(name: str, shape: Sequence[int], device: torch.device) -> torch.Tensor:
    """The first value of a parameter, whole, in bf16: it depends on the name, the shape and the kind of device alone.

    [Note: first weights] Engines build a model in different orders and some hold one part of it, so the seed belongs to the
    name, not to the position. bf16, because some engines make their fp32 master from a bf16 parameter: so all masters are
    equal at first.
    """
    if len(shape) < 2:
        return torch.ones(shape, device=device, dtype=COMPUTE_DTYPE)
    generator = torch.Generator(device).manual_seed(zlib.crc32(name.encode()))
    # Not torch.randn or torch.empty: DeepSpeed replaces those while it builds a model, and would draw other values.
    return torch.normal(0.0, 0.02, tuple(shape), generator=generator, device=device, dtype=torch.float32).to(COMPUTE_DTYPE)


class Linear(nn.Linear):
    """Filled by its constructor with the values of its name, so that whatever watches constructors sees the right ones."""

    def __init__(self, inputs: int, outputs: int, name: str) -> None:
        super().__init__(inputs, outputs, bias=False)
        _fill_parameter(self.weight, name)

    def reset_parameters(self) -> None:
        """Nothing: torch's own values would be drawn only to be overwritten."""


class Embedding(nn.Embedding):
    """As ``Linear``."""

    def __init__(self, count: int, width: int, name: str) -> None:
        super().__init__(count, width)
        _fill_parameter(self.weight, name)

    def reset_parameters(self) -> None:
        """Nothing, as in ``Linear``."""


def _fill_parameter(param: torch.Tensor, name: str) -> None:
    if not param.is_meta:
        with torch.no_grad():
            param.copy_(initial(f"{name}.weight", param.shape, param.device))


class Block(nn.Module):
    """Attention and a gated feed-forward, each behind a norm."""

    def __init__(self, shape: Shape, name: str) -> None:
        super().__init__()
        width, inner = shape.hidden, shape.ffn
        self.heads = shape.heads
        self.attention_norm, self.ffn_norm = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv, self.out = Linear(width, 3 * width, f"{name}.qkv"), Linear(width, width, f"{name}.out")
        self.gate, self.up = Linear(width, inner, f"{name}.gate"), Linear(width, inner, f"{name}.up")
        self.down = Linear(inner, width, f"{name}.down")

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # x: batch, time, width
        batch, length, width = x.shape
        q, k, v = self.qkv(self.attention_norm(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        y = self.ffn_norm(x)
        inner: torch.Tensor = self.down(F.silu(self.gate(y)) * self.up(y))
        return x + inner


class Decoder(nn.Module):
    """Recomputes each block in backward; the vocabulary's logits exist for one sample at a time."""

    recompute = True

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embed = Embedding(shape.vocab, shape.hidden, "embed")
        self.blocks = nn.ModuleList(Block(shape, f"blocks.{index}") for index in range(shape.layers))
        self.norm, self.head = nn.RMSNorm(shape.hidden), Linear(shape.hidden, shape.vocab, "head")

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        x = self.norm(x)
        loss: torch.Tensor = x.new_zeros((), dtype=torch.float32)
        for row, target in zip(x.split(1), labels.split(1), strict=True):
            loss = loss + checkpoint(self._loss, row, target, use_reentrant=False)
        return loss / len(ids)

    def _loss(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.head(x).flatten(0, 1).float(), target.flatten())


def build(shape: Shape, device: torch.device | str, options: Mapping[str, str] | None = None) -> Decoder:
    """The model with its first weights in fp32; on ``"meta"`` without any. ``options``: see ``VARIANTS``."""
    chosen = {"recompute": "1", "compile": "0"} | dict(options or {})
    with torch.device(device):
        model = Decoder(shape)
    model.recompute = chosen["recompute"] == "1"
    for block in model.blocks if chosen["compile"] == "1" else ():
        block.compile()
    return model


def fill(model: nn.Module, device: torch.device) -> None:
    """The first weights for a model that was built on meta and made real since, cut or not. They are drawn on ``device``."""
    with torch.no_grad():
        for name, param in model.named_parameters():
            value = initial(name, param.shape, device)
            if isinstance(param, DTensor):
                # Every rank draws the whole value and keeps its part: nothing is sent.
                value = distribute_tensor(value, param.device_mesh, param.placements, src_data_rank=None).to_local()
                param.to_local().copy_(value)
            else:
                param.copy_(value)


def batch_of(shape: Shape, batch: int, seq: int, device: torch.device, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and the tokens that follow them. Every step trains on the same ones."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, shape.vocab, (batch, seq + 1), generator=generator).to(device)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
