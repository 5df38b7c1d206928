"""What fragments cost at the edge of memory: ``python -m bench.fragmentation [--tiny]``.

A decoder whose states come and go (on the host, within ``device_bytes``) trains 50 steps on samples of changing length. Each
row runs in a process of its own: with torch's allocator as it is, and with ``expandable_segments``, in which freed pieces of
any size are put together again. First without a limit, for the peak of what is allocated; then in a process that may take only
a little more than that from the card. Reported: what is reserved but not allocated after the last step, how often it
had to give everything back and try again, and whether all steps were taken.
"""

import argparse
import json
import os
import random
import subprocess
import sys
from typing import Any

import torch
from torch import nn

import unwall

ROOM = 1.05
"""Of the peak, in the second run."""
ALLOCATORS = {"as it is": "", "expandable segments": "expandable_segments:True"}


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = x + self.down(nn.functional.gelu(self.up(self.norm(x))))
        return found


def train(tiny: bool, steps: int, limit_bytes: int) -> dict[str, Any]:
    """One row, in this process."""
    cuda = torch.cuda.is_available()
    width, depth, most_tokens = (64, 3, 32) if tiny else (4096, 12, 16384)
    if cuda and limit_bytes:
        torch.cuda.set_per_process_memory_fraction(min(1.0, limit_bytes / torch.cuda.mem_get_info()[1]))
    torch.manual_seed(0)
    budget = 1 << 20 if tiny else 2 << 30
    model = nn.Sequential(*(Block(width) for _ in range(depth)))
    unwall.shard(model, unwall.Plan(params="host", optimizer="host", device_bytes=budget))
    optimizer = unwall.AdamW(model.parameters(), lr=1e-4)
    draw, taken = random.Random(0), 0
    device = "cuda" if cuda else "cpu"
    try:
        for _ in range(steps):
            tokens = draw.randrange(most_tokens // 8, most_tokens)
            model(torch.randn(tokens, width, device=device)).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            taken += 1
    except torch.OutOfMemoryError:
        pass
    found = dict.fromkeys(("peak_bytes", "reserved_bytes", "allocated_bytes", "retries"), 0)
    if cuda:
        torch.cuda.synchronize()
        found["peak_bytes"] = torch.cuda.max_memory_allocated()
        found["reserved_bytes"], found["allocated_bytes"] = torch.cuda.memory_reserved(), torch.cuda.memory_allocated()
        found["retries"] = torch.cuda.memory_stats()["num_alloc_retries"]
    return {**found, "steps": taken}


def _row(allocator: str, tiny: bool, steps: int, limit_bytes: int) -> dict[str, Any]:
    environment = {**os.environ, "PYTORCH_CUDA_ALLOC_CONF": ALLOCATORS[allocator], "PYTORCH_ALLOC_CONF": ALLOCATORS[allocator]}
    if not ALLOCATORS[allocator]:
        environment = {name: value for name, value in environment.items() if not name.endswith("ALLOC_CONF")}
    command = [sys.executable, "-m", "bench.fragmentation", "--row", str(limit_bytes), "--steps", str(steps)]
    done = subprocess.run(
        [*command, *(["--tiny"] if tiny else [])], env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"the row {allocator!r} ended with {done.returncode}: {done.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="small sizes, for a machine without an accelerator")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--row", type=int, help="run one row here, within so many bytes (0: no limit)")
    asked = parser.parse_args()
    tiny = asked.tiny or not torch.cuda.is_available()
    if asked.row is not None:
        print(json.dumps(train(tiny, asked.steps, asked.row)))
        return
    print("| allocator | limit | steps | reserved, not allocated | retries |\n|---|---|---|---|---|", flush=True)
    peak = 0
    for limited in (False, True):
        for allocator in ALLOCATORS:
            limit = int(peak * ROOM) if limited else 0
            found = _row(allocator, tiny, asked.steps, limit)
            peak = peak or found["peak_bytes"]
            gap = (found["reserved_bytes"] - found["allocated_bytes"]) / 2**30
            shown = f"{limit / 2**30:.2f} GiB" if limit else "none"
            steps = f"{found['steps']} of {asked.steps}"
            print(f"| {allocator} | {shown} | {steps} | {gap:.2f} GiB | {found['retries']} |", flush=True)


if __name__ == "__main__":
    main()
