"""What fragments cost at the edge of memory: ``python -m bench.fragmentation [--tiny]``.

A stack of blocks that are recomputed, and whose states come and go (on the host, within ``device_bytes``), trains 50 steps on
samples of changing length. Each row runs in a process of its own: without ``Plan(arenas=True)``, with it, and, to compare, with
torch's ``expandable_segments``, in which freed pieces of any size are put together again. First without a limit, for the peak
of what is allocated without arenas; then in processes that may take only a little more than that from the card, less and less.
Reported of each: what is reserved but not allocated after the last step, how often the allocator had to give everything back
and try again, and whether all steps were taken. The last lines say what that means.
"""

import argparse
import json
import os
import random
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
from torch import nn

import unwall

ROOMS = (1.2, 1.1, 1.05)
"""Of the peak."""
ROWS = {"without": (False, ""), "arenas": (True, ""), "expandable": (False, "expandable_segments:True")}
"""``Plan(arenas=...)``, and what torch's allocator is told."""


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = x + self.down(nn.functional.gelu(self.up(self.norm(x))))
        return found


def train(tiny: bool, steps: int, limit_bytes: int, arenas: bool) -> dict[str, Any]:
    """One row, in this process."""
    cuda = torch.cuda.is_available()
    width, depth, most_tokens = (64, 3, 32) if tiny else (2048, 12, 16384)
    if cuda and limit_bytes:
        torch.cuda.set_per_process_memory_fraction(min(1.0, limit_bytes / torch.cuda.mem_get_info()[1]))
    torch.manual_seed(0)
    budget = 1 << 20 if tiny else 512 << 20
    with unwall.init():  # values drawn on the accelerator, one parameter at a time
        model = nn.Sequential(*(Block(width) for _ in range(depth)))
    plan = unwall.Plan(params="host", optimizer="host", device_bytes=budget, activations="recompute", arenas=arenas)
    unwall.shard(model, plan)
    optimizer = unwall.AdamW(model.parameters(), lr=1e-4)
    if cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    draw, taken, losses = random.Random(0), 0, []
    device = "cuda" if cuda else "cpu"
    try:
        for _ in range(steps):
            tokens = draw.randrange(most_tokens // 8, most_tokens)
            loss = model(torch.randn(tokens, width, device=device)).float().square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            del loss
            taken += 1
    except torch.OutOfMemoryError:
        pass
    found = dict.fromkeys(("peak_bytes", "reserved_bytes", "allocated_bytes", "retries"), 0)
    if cuda:
        torch.cuda.synchronize()
        found["peak_bytes"] = torch.cuda.max_memory_allocated()
        found["reserved_bytes"], found["allocated_bytes"] = torch.cuda.memory_reserved(), torch.cuda.memory_allocated()
        found["retries"] = torch.cuda.memory_stats()["num_alloc_retries"]
    return {**found, "steps": taken, "loss": losses[-1] if losses else 0.0}


def _row(name: str, tiny: bool, steps: int, limit_bytes: int) -> dict[str, Any]:
    arenas, allocator = ROWS[name]
    environment = {key: value for key, value in os.environ.items() if not key.endswith("ALLOC_CONF")}
    if allocator:
        environment |= {"PYTORCH_CUDA_ALLOC_CONF": allocator, "PYTORCH_ALLOC_CONF": allocator}
    command = [sys.executable, "-m", "bench.fragmentation", "--row", str(limit_bytes), "--steps", str(steps)]
    command += ["--tiny"] * tiny + ["--arenas"] * arenas
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        return {"error": (done.stderr.strip().splitlines() or ["?"])[-1][:160], "steps": 0, "peak_bytes": 0}
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def compare(tiny: bool, steps: int) -> None:
    """All rows, and what they say."""
    print(
        "| row | limit | steps | reserved, not allocated | retries | peak | loss |\n|---|---|---|---|---|---|---|", flush=True
    )
    peak, ends = 0, []
    for room in (0.0, *ROOMS):
        taken, limit = {}, int(peak * room)
        with ThreadPoolExecutor(len(ROWS)) as beside:  # each row may take its own part of the card only
            rows = list(beside.map(partial(_row, tiny=tiny, steps=steps, limit_bytes=limit), ROWS))
        for name, found in zip(ROWS, rows, strict=True):
            peak, taken[name] = peak or found["peak_bytes"], found["steps"]
            shown = f"{room:.2f} x peak, {limit / 2**30:.2f} GiB" if limit else "none"
            if "error" in found:
                print(f"| {name} | {shown} | {found['error']} | | | | |", flush=True)
                continue
            gap, most = found["reserved_bytes"] - found["allocated_bytes"], found["peak_bytes"]
            memory = f"{gap / 2**30:.2f} GiB | {found['retries']} | {most / 2**30:.2f} GiB"
            print(f"| {name} | {shown} | {found['steps']} of {steps} | {memory} | {found['loss']:.6f} |", flush=True)
        if room and taken["without"] < steps <= taken["arenas"]:
            ends.append(f"with {room:.2f} times the peak it dies without arenas and lives with them")
        elif room and taken["arenas"] < steps <= taken["without"]:
            ends.append(f"with {room:.2f} times the peak it lives without arenas and DIES with them")
    print("\n" + ("\n".join(ends) or "no limit that was tried tells them apart"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="small sizes, for a machine without an accelerator")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--row", type=int, help="run one row here, within so many bytes (0: no limit)")
    parser.add_argument("--arenas", action="store_true", help="that row with Plan(arenas=True)")
    asked = parser.parse_args()
    tiny = asked.tiny or not torch.cuda.is_available()
    if asked.row is None:
        compare(tiny, asked.steps)
    else:
        print(json.dumps(train(tiny, asked.steps, asked.row, asked.arenas)))


if __name__ == "__main__":
    main()
