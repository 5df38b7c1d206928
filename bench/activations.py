"""What each choice for activations costs and frees: ``python -m bench.activations [--shape 3b] [--batch 8] [--seq 2048]``.

Each row runs in a process of its own: the reference decoder without its checkpoints, in plain PyTorch and in unwall, with its
activations kept, recomputed and moved to the host. Ratios are against keeping, in the same run.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import unwall
from bench.shapes import SHAPES, Shape
from bench.workload import ADAMW, COMPUTE_DTYPE, Decoder, batch_of
from unwall.nn import linear_cross_entropy

ROWS = ("plain-keep", "plain-recompute", "unwall-keep", "unwall-recompute", "unwall-host")


class KeepingDecoder(Decoder):
    """The reference decoder, which keeps its activations. Its loss never holds all logits."""

    recompute = False

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        return linear_cross_entropy(self.norm(x), self.head.weight, labels)


def train(row: str, shape: Shape, batch: int, seq: int, steps: int) -> dict[str, Any]:
    """Seconds per step and peak bytes of one row."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with torch.device(device):
        model: nn.Module = KeepingDecoder(shape)
    engine, _, choice = row.partition("-")
    optimizer: torch.optim.Optimizer
    if engine == "plain":
        model.to(COMPUTE_DTYPE)
        model.recompute = choice == "recompute"  # type: ignore[assignment]
        optimizer = torch.optim.AdamW(model.parameters(), fused=device.type == "cuda", **ADAMW)
    else:
        unwall.shard(model, unwall.Plan(params="device", optimizer="device", activations=choice))  # type: ignore[arg-type]
        optimizer = unwall.AdamW(model.parameters(), **ADAMW)
    ids, labels = batch_of(shape, batch, seq, device, 0)
    times, losses = [], []
    for step in range(3 + steps):
        if step == 3 and device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        _wait(device)
        start = time.perf_counter()
        loss = model(ids, labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        _wait(device)
        times.append(time.perf_counter() - start)
        losses.append(loss.item())
    peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else 0
    return {"row": row, "step_s": statistics.median(times[3:]), "peak_bytes": peak, "losses": [losses[0], losses[-1]]}


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def _in_process(row: str, arguments: list[str]) -> dict[str, Any]:
    command = [sys.executable, "-m", "bench.activations", "--row", row, *arguments]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    if found.returncode:
        return {"row": row, "error": (found.stderr.strip().splitlines() or ["?"])[-1][:200]}
    result: dict[str, Any] = json.loads(found.stdout.splitlines()[-1])
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", default="3b", choices=sorted(SHAPES))
    parser.add_argument("--hidden", type=int, help="another width")
    parser.add_argument("--layers", type=int, help="another depth")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--seq", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--rows", nargs="*", default=ROWS)
    parser.add_argument("--row")
    given = parser.parse_args()
    shape = SHAPES[given.shape]
    if given.hidden or given.layers:
        hidden = given.hidden or shape.hidden
        shape = Shape(
            hidden=hidden, layers=given.layers or shape.layers, heads=hidden // 128, ffn=4 * hidden, vocab=shape.vocab
        )
    if given.row:
        print(json.dumps(train(given.row, shape, given.batch, given.seq, given.steps)))
        return
    arguments = [argument for argument in sys.argv[1:] if argument != "--rows" and argument not in ROWS]
    found = [_in_process(row, arguments) for row in given.rows]
    base = {row["row"].partition("-")[0]: row.get("step_s") for row in found if row["row"].endswith("keep")}
    print("| row | step s | against keeping | peak GiB | loss, first and last |\n|---|---|---|---|---|")
    for row in found:
        if "error" in row:
            print(f"| {row['row']} | {row['error']} | | | |")
            continue
        keep = base.get(row["row"].partition("-")[0])
        ratio = f"{row['step_s'] / keep:.3f}" if keep else ""
        losses = ", ".join(f"{loss:.4f}" for loss in row["losses"])
        print(f"| {row['row']} | {row['step_s']:.4f} | {ratio} | {row['peak_bytes'] / 2**30:.1f} | {losses} |")


if __name__ == "__main__":
    main()
