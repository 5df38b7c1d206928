"""Sparse attention against dense: ``python -m bench.sparse [--tokens 16384 65536 131072]``.

The attention of one layer of the reference decoder's size (25 heads of 128), forward and backward, bf16: causal SDPA without a
mask, and patterns of ``unwall.sparse`` (causal, too). "ideal" is what the share of blocks that are seen would give.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch.nn import functional

from unwall import sparse

HEADS, WIDTH = 25, 128
PATTERNS = {
    "window of 4096": sparse.window(4096),
    "window of 1024": sparse.window(1024),
    "bigbird, blocks of 128, 9 wide": sparse.bigbird(
        block=128, num_random_blocks=3, num_sliding_window_blocks=9, attention="unidirectional"
    ),
}


def measured(run: Callable[[], torch.Tensor], tensors: list[torch.Tensor], rounds: int = 5) -> tuple[float, float]:
    """Seconds and GiB of one forward and backward."""
    upstream = torch.ones_like(tensors[0])
    times = []
    for number in range(rounds + 2):
        if number == 2:
            _wait()
            if torch.cuda.is_available():
                torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        torch.autograd.grad(run(), tensors, upstream)
        _wait()
        times.append(time.perf_counter() - start)
    peak = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0
    return statistics.median(times[2:]), peak / 2**30


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def seen_share(pattern: sparse.patterns.Pattern, tokens: int, block: int = 128) -> float:
    """Of the pairs of blocks that causal attention sees, how many this one sees (looked at by their corners and diagonals)."""
    function = sparse.patterns.mask_function(pattern, tokens)
    starts = torch.arange(0, tokens, block)
    zero = torch.tensor(0)
    seen = torch.zeros(len(starts), len(starts), dtype=torch.bool)
    for q, k in ((0, 0), (0, block - 1), (block - 1, 0), (block - 1, block - 1)):
        seen |= function(zero, zero, (starts + q)[:, None], starts + k)
    lower = torch.ones_like(seen).tril()
    return float((seen & lower).sum() / lower.sum())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, nargs="*", default=[16384, 65536, 131072])
    device = "cuda" if torch.cuda.is_available() else "cpu"
    print("| tokens | attention | blocks seen | seconds | speed-up | of the ideal | peak GiB |\n|---|---|---|---|---|---|---|")
    for tokens in parser.parse_args().tokens:
        _rows(tokens, device)


def _rows(tokens: int, device: str) -> None:
    shape = (1, HEADS, tokens, WIDTH)
    tensors = [torch.randn(shape, device=device, dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
    dense, peak = measured(lambda: functional.scaled_dot_product_attention(*tensors, is_causal=True), tensors)
    print(f"| {tokens} | dense, causal | 1.00 | {dense:.4f} | 1.00 | | {peak:.1f} |", flush=True)
    for name, pattern in PATTERNS.items():
        found, peak = measured(lambda pattern=pattern: sparse.attention(*tensors, pattern, causal=True), tensors)
        share, gain = seen_share(pattern, tokens), dense / found
        row = f"| {tokens} | {name} | {share:.3f} | {found:.4f} | {gain:.2f} | {gain * share:.2f} | {peak:.1f} |"
        print(row, flush=True)


if __name__ == "__main__":
    main()
