"""The reference workload: a Llama-shaped decoder in plain PyTorch, its FLOPs, and how a step is timed."""

import resource
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils.checkpoint import checkpoint


@dataclass(frozen=True)
class Shape:
    """The sizes of a decoder."""

    hidden: int
    layers: int
    ffn: int
    heads: int
    vocab: int

    @property
    def params(self) -> int:
        block = 4 * self.hidden**2 + 3 * self.hidden * self.ffn + 2 * self.hidden
        return self.layers * block + 2 * self.vocab * self.hidden + self.hidden

    def flops(self, batch: int, seq: int) -> float:
        """Model FLOPs of one step: 6 per weight and token, and causal attention; recomputation is not counted."""
        dense = self.layers * (4 * self.hidden**2 + 3 * self.hidden * self.ffn) + self.vocab * self.hidden
        return 6.0 * dense * batch * seq + 6.0 * self.layers * self.hidden * seq * seq * batch


SHAPES = {
    "tiny": Shape(64, 4, 176, 4, 512),
    "50m": Shape(512, 8, 1408, 8, 16000),
    "125m": Shape(768, 12, 2048, 12, 32000),
    "1b": Shape(2048, 22, 5632, 16, 32000),
    "3b": Shape(3200, 26, 8640, 32, 32000),
    "7b": Shape(4096, 32, 11008, 32, 32000),
    "13b": Shape(5120, 40, 13824, 40, 32000),
    "20b": Shape(6144, 44, 16384, 48, 32000),
}


class Block(nn.Module):
    """Attention and a gated feed-forward, each behind a norm."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        width, inner = shape.hidden, shape.ffn
        self.heads = shape.heads
        self.attention_norm, self.ffn_norm = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.gate, self.up = nn.Linear(width, inner, bias=False), nn.Linear(width, inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # x: batch, time, width
        batch, length, width = x.shape
        q, k, v = self.qkv(self.attention_norm(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        y = self.ffn_norm(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Decoder(nn.Module):
    """Recomputes each block in backward; the vocabulary's logits exist for one sample at a time."""

    def __init__(self, shape: Shape, recompute: bool = True) -> None:
        super().__init__()
        self.recompute = recompute
        self.embed = nn.Embedding(shape.vocab, shape.hidden)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm, self.head = nn.RMSNorm(shape.hidden), nn.Linear(shape.hidden, shape.vocab, bias=False)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        x = self.norm(x)
        loss = x.new_zeros((), dtype=torch.float32)
        for row, target in zip(x.split(1), labels.split(1), strict=True):
            loss = loss + checkpoint(self._loss, row, target, use_reentrant=False)
        return loss / len(ids)

    def _loss(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.head(x).flatten(0, 1).float(), target.flatten())


def init_weights(model: nn.Module) -> None:
    """The values every engine starts from: drawn whole, parameter by parameter, from one seed on the parameter's device."""
    torch.manual_seed(0)
    with torch.no_grad():
        for param in model.parameters():
            whole = torch.empty(param.shape, device=param.device)
            nn.init.normal_(whole, std=0.02) if param.dim() > 1 else nn.init.ones_(whole)
            if isinstance(param, DTensor):
                whole = distribute_tensor(whole, param.device_mesh, param.placements)
            param.copy_(whole)


def init_whole(model: nn.Module, full_params: Callable[..., AbstractContextManager[None]]) -> None:
    """The same values for a sharded model, one module at a time."""
    torch.manual_seed(0)
    for module in model.modules():
        own = list(module.parameters(recurse=False))
        if own:
            with full_params(module, write=True), torch.no_grad():
                for param in own:
                    nn.init.normal_(param, std=0.02) if param.dim() > 1 else nn.init.ones_(param)


def batch_of(shape: Shape, batch: int, seq: int, device: torch.device, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, shape.vocab, (batch, seq + 1), generator=generator).to(device)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


@dataclass
class Timing:
    """What a run of steps took."""

    step_s: float
    """Median."""
    first_s: float
    losses: list[float]
    device_gib: float
    host_gib: float


def time_steps(step: Callable[[], torch.Tensor], steps: int, warm: int, device: torch.device) -> Timing:
    """``step()`` gives the loss. Each step is timed to its end on the device."""
    wait = torch.cuda.synchronize if device.type == "cuda" else (lambda: None)
    losses, times = [], []
    for _ in range(warm + steps):
        wait()
        start = time.perf_counter()
        loss = step()
        wait()
        times.append(time.perf_counter() - start)
        losses.append(float(loss))
    timed = sorted(times[warm:])
    peak = torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else 0.0
    rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    return Timing(timed[len(timed) // 2], times[0], losses, peak, rss)
