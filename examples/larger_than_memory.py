"""A model larger than its memory: what the device's budget does not hold goes to the host, and the rest to disk.

The defaults are tiny, so that it runs anywhere in seconds: budgets of a few MiB stand for a GPU and a host that are too small.
At the end it prints what each tier held and what crossed each link.

Run it:     python examples/larger_than_memory.py
In earnest: python examples/larger_than_memory.py --width 8192 --layers 40 --device-bytes 20GiB --host-bytes 60GiB --disk /fast
"""

import argparse
import tempfile

import torch
from torch import nn

import unwall


def build(width: int, layers: int) -> nn.Module:
    """A stack of layers: plain PyTorch, it knows nothing of unwall."""
    return nn.Sequential(*[nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.Tanh()) for _ in range(layers)])


def train(plan: unwall.Plan, width: int, layers: int, steps: int) -> None:
    with unwall.init(plan):  # the model never exists whole, neither here nor on the device
        model = build(width, layers)
    unwall.shard(model, plan)
    optimizer = unwall.AdamW(model.parameters(), lr=1e-3)
    count = sum(param.numel() for param in model.parameters())
    print(f"{count:,} parameters, {14 * count / 2**20:.1f} MiB of states (14 bytes per parameter in bf16)")

    device = next(model.parameters()).device
    inputs, target = torch.randn(16, width, device=device), torch.rand(16, width, device=device) - 0.5
    for step in range(steps):
        loss = nn.functional.mse_loss(model(inputs).float(), target)
        loss.backward()
        optimizer.step()  # returns at once: the next forward waits group by group
        optimizer.zero_grad()
        print(f"step {step + 1}: loss {loss.item():.4f}")
    print()
    print(unwall.stats(model))


def main() -> None:
    parser = argparse.ArgumentParser(description="Trains a model larger than the memory it may use.")
    parser.add_argument("--device-bytes", default="3MiB", help="what unwall may hold on the device (default 3MiB)")
    parser.add_argument("--host-bytes", default="12MiB", help="what it may hold in host memory (default 12MiB)")
    parser.add_argument("--disk", help="a directory on a fast drive (default: a temporary one)")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--steps", type=int, default=5)
    chosen = parser.parse_args()
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        plan = unwall.Plan(
            device_bytes=chosen.device_bytes, host_bytes=chosen.host_bytes, disk=folder if chosen.disk is None else chosen.disk
        )
        train(plan, chosen.width, chosen.layers, chosen.steps)


if __name__ == "__main__":
    main()
