"""The main job on an embedded default: a small byte-level language model learns unwall's own source files."""

from pathlib import Path

import torch
import torch.nn.functional as F  # noqa: N812
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import nn

import unwall
from unwall.tiers.sizes import format_bytes


class DemoBlock(nn.Module):
    """One transformer block."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # x: batch, time, width
        batch, time, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, time, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, time, width))
        narrow: torch.Tensor = self.down(F.gelu(self.up(self.norm2(x))))
        return x + narrow


class ByteModel(nn.Module):
    """A decoder over bytes. Plain PyTorch: it knows nothing of unwall."""

    def __init__(self, width: int = 128, layers: int = 4, heads: int = 4, context: int = 128) -> None:
        super().__init__()
        self.context = context
        self.embed, self.position = nn.Embedding(256, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(DemoBlock(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids) + self.position(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1).float(), labels.flatten())


def source_bytes() -> torch.Tensor:
    """The library's own Python files, end to end."""
    text = b"\n".join(path.read_bytes() for path in sorted(Path(__file__).parent.rglob("*.py")))
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).long()


def run(steps: int, batch: int = 16, console: Console | None = None) -> list[float]:
    """Trains and prints; returns the loss of every step."""
    console = Console() if console is None else console
    torch.manual_seed(0)
    data = source_bytes()
    with unwall.init():
        model = ByteModel()
    unwall.shard(model)
    optimizer = unwall.AdamW(model.parameters(), lr=3e-3, max_grad_norm=1.0)
    device = next(model.parameters()).device
    count = sum(param.numel() for param in model.parameters())
    console.print(f"{count:,} parameters, {len(data):,} bytes of source, on {device}")
    losses: list[float] = []
    columns = (
        TextColumn("step"),
        MofNCompleteColumn(),
        BarColumn(),
        TextColumn("loss {task.fields[loss]:.3f}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("training", total=steps, loss=float("nan"))
        for _ in range(steps):
            at = torch.randint(len(data) - model.context - 1, (batch,))
            rows = torch.stack([data[start : start + model.context + 1] for start in at.tolist()]).to(device)
            loss = model(rows[:, :-1], rows[:, 1:])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            progress.update(task, advance=1, loss=losses[-1])
    held = unwall.stats(model).tiers["device"]
    console.print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}; device tier: {format_bytes(held.peak_bytes)} at its peak")
    return losses
