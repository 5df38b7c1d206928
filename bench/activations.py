"""What each choice for activations costs and frees: ``python -m bench.activations [--shape 3b] [--batch 8] [--seq 2048]``.

Each row runs in a process of its own: the reference decoder without its checkpoints, in plain PyTorch and in unwall, with its
activations kept, recomputed, moved to the host, or as unwall decides. Ratios are against keeping, in the same run.

``python -m bench.activations --must-hold`` runs all that is promised of them: the default plan against plain PyTorch, 24 GiB
with states on the host against recomputing everything, ``"host"`` with 16K tokens per sample at three widths, and the longest
sequence, with dense attention and with a window. ``--small`` makes each of them small enough for two cores.
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
from torch.nn import functional as F  # noqa: N812 (as torch calls it)
from torch.utils.checkpoint import checkpoint

import unwall
from bench.shapes import SHAPES, Shape
from bench.workload import ADAMW, COMPUTE_DTYPE, Block, Decoder, Embedding, Linear, batch_of
from unwall import sparse
from unwall.nn import linear_cross_entropy
from unwall.runtime import link_speed
from unwall.tiers.sizes import parse_bytes

ROWS = ("plain-keep", "plain-recompute", "unwall-default", "unwall-keep", "unwall-recompute", "unwall-host")
TILES = 16
LIMIT_S = 60.0
"""For one row."""
INPUTS_BYTES = 3 << 30
"""Of all blocks, where what they free is compared with the formula: up to 1 GiB of them is in flight."""
CARD = "24GiB"
"""Of a card with more: the longest sample of all of an H200 takes half an hour per step."""
WINDOW = 4096
"""Tokens that a token sees, in rows with -window."""
STATES = "2GiB"
"""Of that, for parameters that come and go (rows with -offload)."""


class Mlp(nn.Module):
    """The feed-forward of a block, as a module of its own: what runs in sequence tiles."""

    def __init__(self, gate: nn.Module, up: nn.Module, down: nn.Module) -> None:
        super().__init__()
        self.gate, self.up, self.down = gate, up, down

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return found


class LongBlock(Block):
    """The reference block with its feed-forward as a module, and attention that may be sparse."""

    pattern: Any = None

    def __init__(self, shape: Shape, name: str) -> None:
        super().__init__(shape, name)
        self.mlp = Mlp(self.gate, self.up, self.down)
        del self.gate, self.up, self.down

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.attention_norm(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        if self.pattern is None:
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            mixed = sparse.attention(q, k, v, self.pattern, causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        found: torch.Tensor = x + self.mlp(self.ffn_norm(x))
        return found


class KeepingDecoder(Decoder):
    """The reference decoder, which keeps its activations. Its loss never holds all logits."""

    recompute = False
    whole_logits = False

    def __init__(self, shape: Shape) -> None:
        nn.Module.__init__(self)
        self.embed = Embedding(shape.vocab, shape.hidden, "embed")
        self.norm, self.head = nn.RMSNorm(shape.hidden), Linear(shape.hidden, shape.vocab, "head")
        self.blocks = nn.ModuleList(LongBlock(shape, f"blocks.{index}") for index in range(shape.layers))

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        x = self.norm(x)
        if self.whole_logits:
            return F.cross_entropy(self.head(x).flatten(0, 1).float(), labels.flatten())
        return linear_cross_entropy(x, self.head.weight, labels)


def options_of(row: str, budget: str | None) -> dict[str, Any]:
    """The plan of a row: ``unwall-CHOICE``, ``-offload`` with states on the host, ``-tiles`` in sequence tiles, ``-whole``
    where ``"auto"`` may move whole blocks, ``-window`` with sparse attention."""
    _, choice, *more = row.split("-")
    if choice == "default":
        return {}
    tier = "host" if "offload" in more else "device"
    found: dict[str, Any] = {"params": tier, "optimizer": tier, "activations": choice}
    if budget and "offload" in more:
        found["device_bytes"] = budget
    if "tiles" in more:
        found["sequence_tiles"] = TILES
    return found


def build(
    row: str, shape: Shape, device: torch.device, budget: str | None, frozen: bool = False
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """``frozen``: the blocks have no gradients of their own, which would take the memory that their inputs leave."""
    with torch.device(device):
        model = KeepingDecoder(shape)
    pattern = sparse.window(WINDOW) if "window" in row.split("-") else None
    for block in model.blocks:
        block.requires_grad_(not frozen)
        block.pattern = pattern
    optimizer: torch.optim.Optimizer
    if row.startswith("plain"):
        model.to(COMPUTE_DTYPE)
        model.recompute = "recompute" in row
        model.whole_logits = "logits" in row
        optimizer = torch.optim.AdamW(model.parameters(), fused=device.type == "cuda", **ADAMW)
        return model, optimizer
    options = options_of(row, budget)
    link_speed.WHOLE_BLOCKS = "whole" in row
    if "offload" in row and options["activations"] == "recompute":
        del options["device_bytes"]  # with a choice by hand it would cover states alone
    unwall.shard(model, unwall.Plan(**options))
    return model, unwall.AdamW(model.parameters(), **ADAMW)


def train(
    row: str, shape: Shape, batch: int, seq: int, steps: int, budget: str | None = None, frozen: bool = False
) -> dict[str, Any]:
    """Seconds per step and peak bytes of one row."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model, optimizer = build(row, shape, device, budget, frozen)
    ids, labels = batch_of(shape, batch, seq, device, 0)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()  # building the model took more
    times, losses = [], []
    warm = 9 if "offload" in row else 4 if "auto" in row or "default" in row else 2  # updates ahead begin after eight steps
    for step in range(warm + steps):
        if step == warm and device.type == "cuda":
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
    found = {"row": row, "step_s": statistics.median(times[warm:]), "peak_bytes": peak, "losses": [losses[0], losses[-1]]}
    decides = None if row.startswith("plain") else unwall.api.engine(model).activations
    if decides is not None:
        found["used"] = {choice: decides.used.count(choice) for choice in sorted(set(decides.used))}
    return found


def longest(row: str, shape: Shape, start: int, most: int, card: str | None) -> dict[str, Any]:
    """The longest sample that trains within ``card`` bytes: doubled for as long as it does, then one try in between. Each that
    trained is printed with the seconds of its step, which may include compiling."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if card and device.type == "cuda":
        torch.cuda.set_per_process_memory_fraction(parse_bytes(card) / torch.cuda.mem_get_info()[1])
    model, optimizer = build(row, shape, device, STATES)

    def trains(seq: int) -> bool:
        start = time.perf_counter()
        try:
            ids, labels = batch_of(shape, 1, seq, device, 0)
            model(ids, labels).backward()
            optimizer.step()
            optimizer.zero_grad()
            _wait(device)
        except torch.OutOfMemoryError:
            return False
        finally:
            if device.type == "cuda":
                torch.cuda.empty_cache()
        seconds[seq] = time.perf_counter() - start
        print(json.dumps({"row": row, "longest": seq, "step_s": seconds[seq], "stopped": "limit"}), flush=True)
        return True

    seconds: dict[int, float] = {}
    seq, begun = start, time.perf_counter()
    trains(start // 4)  # states come into being
    best = 0
    while seq <= most and time.perf_counter() - begun < LIMIT_S / 2 and trains(seq):
        best, seq = seq, 2 * seq
    stopped = "memory" if seq <= most and time.perf_counter() - begun < LIMIT_S / 2 else "limit"
    if stopped == "memory" and best and trains(3 * best // 2):
        best = 3 * best // 2
    return {"row": row, "longest": best, "step_s": seconds.get(best), "stopped": stopped}


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def _in_process(row: str, arguments: list[str]) -> dict[str, Any]:
    command = [sys.executable, "-m", "bench.activations", "--row", row, *arguments]
    try:
        found = subprocess.run(command, capture_output=True, text=True, check=False, timeout=LIMIT_S)
    except subprocess.TimeoutExpired as late:
        told = (late.stdout or b"").decode().splitlines()
        return json.loads(told[-1]) if told else {"row": row, "error": f"not done in {LIMIT_S:.0f} s"}
    if found.returncode:
        return {"row": row, "error": (found.stderr.strip().splitlines() or ["?"])[-1][:200]}
    result: dict[str, Any] = json.loads(found.stdout.splitlines()[-1])
    return result


PARTS = ("default", "budget", "host", "longest", "window")


def must_hold(small: bool, parts: list[str]) -> None:
    """The promises of the docs, one table each."""
    size = ["--shape", "tiny", "--batch", "2", "--seq", "64"] if small else ["--shape", "3b", "--batch", "8", "--seq", "2048"]
    if "default" in parts:
        table("The default plan against plain PyTorch", ("plain-keep", "unwall-default"), [*size, "--steps", "4"])
    if "budget" in parts:
        budget = "2MiB" if small else "24GiB"
        rows = ("unwall-recompute-offload", "unwall-auto-offload", "unwall-auto-offload-whole")
        table(f"States on the host, {budget} in all for the auto row", rows, [*size, "--steps", "4", "--budget", budget])
    for hidden in ((64, 128) if small else (2048, 4096, 8192)) * ("host" in parts):
        seq = 64 if small else 16384
        layers = 2 if small else INPUTS_BYTES // (2 * seq * hidden)
        given = ["--shape", "tiny" if small else "3b", "--layers", str(layers), "--batch", "1", "--seq", str(seq)]
        inputs = f"{layers} inputs of {2 * seq * hidden / 2**30:.3g} GiB"
        title = f"Hidden {hidden}, {seq} tokens per sample, frozen blocks, {inputs}: on the device, and on the host"
        table(title, ("unwall-recompute", "unwall-host"), [*given, "--hidden", str(hidden), "--steps", "3", "--frozen"])
    if "longest" in parts:
        given = ["--shape", "tiny", "--longest", "64", "512"] if small else ["--shape", "1b", "--longest", "8192", "131072"]
        print(f"\nThe longest sample of {given[1]} on a card of {CARD}")
        for row in ("plain-recompute-logits", "unwall-host-offload-tiles"):
            print(json.dumps(_in_process(row, [*given, "--card", CARD])), flush=True)
    if "window" in parts:
        given = ["--shape", "tiny", "--longest", "64", "512"] if small else ["--shape", "1b", "--longest", "131072", "524288"]
        print(f"\nThe longest sample of {given[1]} on a card of {CARD}, dense and with a window of {WINDOW}")
        for row in ("unwall-host-offload-tiles", "unwall-host-offload-tiles-window"):
            print(json.dumps(_in_process(row, [*given, "--card", CARD])), flush=True)


def table(title: str, rows: tuple[str, ...], arguments: list[str]) -> None:
    found = [_in_process(row, arguments) for row in rows]
    base = next((row["step_s"] for row in found if "step_s" in row), None)
    print(f"\n{title}\n\n| row | step s | against the first | peak GiB | losses | blocks |\n|---|---|---|---|---|---|")
    for row in found:
        if "error" in row:
            print(f"| {row['row']} | {row['error']} | | | | |", flush=True)
            continue
        ratio = f"{row['step_s'] / base:.3f}" if base else ""
        losses = ", ".join(f"{loss:.4f}" for loss in row["losses"])
        used = ", ".join(f"{count} {choice}" for choice, count in row.get("used", {}).items())
        peak = f"{row['peak_bytes'] / 2**30:.2f}"
        print(f"| {row['row']} | {row['step_s']:.4f} | {ratio} | {peak} | {losses} | {used} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--must-hold", nargs="*", choices=PARTS, help="all of it, or these parts")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--shape", default="3b", choices=sorted(SHAPES))
    parser.add_argument("--hidden", type=int, help="another width")
    parser.add_argument("--layers", type=int, help="another depth")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--seq", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--budget", help="device_bytes of rows with -offload")
    parser.add_argument("--longest", type=int, nargs=2, metavar=("START", "MOST"), help="the longest sample instead of seconds")
    parser.add_argument("--card", help="of the card's memory, for the longest sample")
    parser.add_argument("--frozen", action="store_true", help="blocks without gradients of their own")
    parser.add_argument("--rows", nargs="*", default=ROWS)
    parser.add_argument("--row")
    given = parser.parse_args()
    if given.must_hold is not None:
        must_hold(given.small, given.must_hold or list(PARTS))
        return
    shape = SHAPES[given.shape]
    if given.hidden or given.layers:
        hidden = given.hidden or shape.hidden
        heads = max(1, hidden // 128)
        shape = Shape(hidden=hidden, layers=given.layers or shape.layers, heads=heads, ffn=4 * hidden, vocab=shape.vocab)
    if given.row and given.longest:
        print(json.dumps(longest(given.row, shape, *given.longest, card=given.card)))
    elif given.row:
        print(json.dumps(train(given.row, shape, given.batch, given.seq, given.steps, given.budget, given.frozen)))
    else:
        arguments = [argument for argument in sys.argv[1:] if argument != "--rows" and argument not in ROWS]
        table("Activations", tuple(given.rows), arguments)


if __name__ == "__main__":
    main()
