"""Layers that do not fit the device: ``python -m bench.tiling [--tiny]``.

1. The largest hidden size H of one linear layer H -> 4H that runs forward and backward on a card whose memory was cut into
   pieces of 2 GiB before, so that nothing larger can be allocated, whole and in 4, 16 and 64 tiles. (Without an accelerator the
   pieces are only pretended: a run counts as failed if it takes a larger block.)
2. A layer of 8 times ``device_bytes``, states on the host: step time and peak, against the same layer whole.
"""

import argparse
import gc
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

import unwall
from unwall.shards.master import write_master

PLUG_BYTES = 2 << 20
"""Keeps a piece from being given back to the driver, which would put pieces together again."""
CHUNK = 1 << 24


@contextmanager
def fragmented(piece_bytes: int, most_bytes: int | None = None) -> Iterator[int]:
    """All of the card, or ``most_bytes`` where this process is not allowed more, in pieces that nothing larger fits into. Gives
    their number."""
    if not torch.cuda.is_available():
        yield 0
        return
    gc.collect()
    torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info()[0] if most_bytes is None else most_bytes - torch.cuda.memory_reserved()
    count = (free - piece_bytes // 2) // (piece_bytes + PLUG_BYTES)
    pieces, plugs = [], []
    for _ in range(count):
        segment = torch.empty(piece_bytes + PLUG_BYTES, dtype=torch.uint8, device="cuda")
        del segment  # cached now: the next two are cut from it
        pieces.append(torch.empty(piece_bytes, dtype=torch.uint8, device="cuda"))
        plugs.append(torch.empty(PLUG_BYTES, dtype=torch.uint8, device="cuda"))
    pieces.clear()
    try:
        yield count
    finally:
        plugs.clear()
        gc.collect()
        torch.cuda.empty_cache()


def runs(hidden: int, tiles: int, piece_bytes: int, tokens: int) -> bool:
    """Whether a layer trains: forward, backward, its gradient kept."""
    try:
        _forward_and_backward(hidden, tiles, piece_bytes, tokens)
    except (torch.OutOfMemoryError, unwall.PlanError, unwall.BudgetError, MemoryError):
        return False
    finally:
        gc.collect()
    return True


def _forward_and_backward(hidden: int, tiles: int, piece_bytes: int, tokens: int) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = nn.Sequential(nn.Linear(hidden, 4 * hidden, bias=False, device="meta", dtype=torch.bfloat16))
    unwall.shard(model, unwall.Plan(tiles=tiles, params="device", optimizer="device"))
    engine = unwall.api.engine(model)
    engine.unwritten.clear()
    for group in engine.groups:  # the layer never exists whole
        if device.type == "cpu" and group.layout.flat_bytes > piece_bytes:
            raise MemoryError(f"a block of {group.layout.flat_bytes} bytes")
        for start in range(0, group.own_numel, CHUNK):
            values = torch.randn(min(CHUNK, group.own_numel - start), device=device) * hidden**-0.5
            write_master(group, start, values)
    loss = model(torch.randn(tokens, hidden, device=device, dtype=torch.bfloat16, requires_grad=True)).float().square().mean()
    loss.backward()
    if not bool(loss.isfinite()):
        raise RuntimeError(f"the loss of a layer with hidden size {hidden} is {loss.item()}")


def largest(tiles: int, sizes: list[int], piece_bytes: int, tokens: int) -> int:
    """The largest of ``sizes`` that runs, by bisection. 0: none."""
    low, high = -1, len(sizes)
    while high - low > 1:
        middle = (low + high) // 2
        if runs(sizes[middle], tiles, piece_bytes, tokens):
            low = middle
        else:
            high = middle
    return sizes[low] if low >= 0 else 0


def train(hidden: int, tokens: int, plan: unwall.Plan, steps: int) -> dict[str, Any]:
    """Seconds per step, and what it took on the device."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    model = unwall.shard(nn.Sequential(nn.Linear(hidden, 4 * hidden, bias=False)), plan)
    optimizer = unwall.AdamW(model.parameters(), lr=1e-4)
    inputs = torch.randn(tokens, hidden, device=device, dtype=plan.compute_dtype, requires_grad=True)
    times, losses = [], []
    for step in range(2 + steps):
        if step == 2:
            unwall.stats(model).reset()
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats()
        _wait()
        start = time.perf_counter()
        loss = model(inputs).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        inputs.grad = None
        _wait()
        times.append(time.perf_counter() - start)
        losses.append(loss.item())
    peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else 0
    engine = unwall.api.engine(model)
    found = {
        "tiles": len(engine.places[id(model[0].weight)]),
        "seconds": statistics.median(times[2:]),
        "ledger_bytes": unwall.stats(model).tiers["device"].peak_bytes,
        "peak_bytes": peak,
        "losses": losses,
    }
    engine.finish()
    return found


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _figure(tiny: bool) -> None:
    step, most = (64, 10) if tiny else (4096, 24)
    piece_bytes, tokens = (128 << 10, 4) if tiny else (2 << 30, 256)
    sizes = [step * (index + 1) for index in range(most)]
    unit = f"{piece_bytes >> 20} MiB" if piece_bytes >= 1 << 20 else f"{piece_bytes >> 10} KiB"
    with fragmented(piece_bytes) as count:
        print(f"\nLargest H of one layer H -> 4H (bf16, AdamW's master, gradient), memory in {count} pieces of {unit}\n")
        print("| tiles | largest H | seconds for the search |\n|---|---|---|", flush=True)
        for tiles in (1, 4, 16, 64):
            start = time.perf_counter()
            found = largest(tiles, sizes, piece_bytes, tokens)
            print(f"| {tiles} | {found} | {time.perf_counter() - start:.1f} |", flush=True)


def _against_whole(tiny: bool) -> None:
    hidden, tokens, steps = (1024, 8, 2) if tiny else (8192, 4096, 5)
    weight_bytes = 4 * hidden * hidden * 2
    where: dict[str, Any] = {"params": "host", "optimizer": "host"}
    rows = {
        "whole": unwall.Plan(tiles=1, **where),
        "in tiles, device_bytes an eighth of the layer": unwall.Plan(device_bytes=weight_bytes // 8, **where),
    }
    print(
        f"\nOne layer {hidden} -> {4 * hidden} ({weight_bytes / 2**20:.0f} MiB in bf16), {tokens} tokens, states on the host\n"
    )
    print("| row | tiles | step | held by unwall at most | peak with activations | last loss |\n|---|---|---|---|---|---|")
    for name, plan in rows.items():
        found = train(hidden, tokens, plan, steps)
        held, peak = found["ledger_bytes"] / 2**20, found["peak_bytes"] / 2**20
        line = f"| {name} | {found['tiles']} | {found['seconds']:.4f} s | {held:.1f} MiB | {peak:.0f} MiB |"
        print(f"{line} {found['losses'][-1]:.6f} |", flush=True)
        gc.collect()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="small sizes, for a machine without an accelerator")
    tiny = parser.parse_args().tiny or not torch.cuda.is_available()
    _against_whole(tiny)
    _figure(tiny)


if __name__ == "__main__":
    main()
