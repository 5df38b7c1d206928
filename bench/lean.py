"""Lean states against exact ones: ``python -m bench.lean [--steps 2000] [--seeds 3] [--only text|rare] [--tier host]``.

Two tasks, each trained with ``AdamW(states="exact")`` and ``AdamW(states="lean")`` on the same seeds (the same first weights
and the same batches), bf16 compute. "text": a byte-level language model learns this library's own source files. "rare": the
stress test, a table of embeddings in which most rows get a gradient only now and then (token frequencies fall as 1/rank) and
must still learn their labels. What is compared is the mean loss of the last tenth of the steps and, for "rare", the loss over
all tokens that were seen at most ten times. The spread over seeds says what a difference means.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Literal

import torch
from torch import nn
from torch.nn import functional

import unwall
from unwall.demo import ByteModel, source_bytes
from unwall.plans import Plan

States = Literal["exact", "lean"]
KINDS: tuple[States, ...] = ("exact", "lean")
TOKENS, LABELS, RARE = 8192, 64, 10


class RareTokens(nn.Module):
    """Each token has a label, and only its own row of the table can learn it."""

    def __init__(self, width: int = 48) -> None:  # rows that are no multiple of a block of 64: neighbours share scales
        super().__init__()
        self.embed, self.head = nn.Embedding(TOKENS, width), nn.Linear(width, LABELS)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(self.head(self.embed(ids)).float(), labels)


def train(
    model: nn.Module, batches: Iterator[tuple[torch.Tensor, torch.Tensor]], lr: float, steps: int, states: States, tier: str
) -> list[float]:
    """The losses of a run."""
    unwall.shard(model, Plan(params=tier, optimizer=tier, states=states))  # type: ignore[arg-type]
    optimizer = unwall.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.999), weight_decay=0.01)
    losses = []
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = lr * min(1.0, (step + 1) / 50) * (1 - 0.9 * step / steps)
        loss = model(*next(batches))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def text(seed: int, steps: int, states: States, tier: str) -> dict[str, float]:
    """A byte-level language model."""
    torch.manual_seed(seed)
    model, data = ByteModel(width=64, layers=2, heads=2, context=64), source_bytes()
    generator = torch.Generator().manual_seed(seed)

    def batches() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        while True:
            at = torch.randint(len(data) - 65, (16,), generator=generator)
            rows = torch.stack([data[start : start + 65] for start in at.tolist()])
            yield rows[:, :-1], rows[:, 1:]

    return {"loss": _last(train(model, batches(), 2e-3, steps, states, tier))}


def rare(seed: int, steps: int, states: States, tier: str) -> dict[str, float]:
    """The stress test."""
    torch.manual_seed(seed)
    model = RareTokens()
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(LABELS, (TOKENS,), generator=generator)
    often = 1 / torch.arange(1, TOKENS + 1)
    seen = torch.zeros(TOKENS, dtype=torch.int64)

    def batches() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        while True:
            ids = torch.multinomial(often, 64, replacement=True, generator=generator)
            seen.index_add_(0, ids, torch.ones_like(ids))
            yield ids, labels[ids]

    last = _last(train(model, batches(), 1e-2, steps, states, tier))
    chosen = torch.nonzero((seen > 0) & (seen <= RARE)).flatten()
    with torch.no_grad():
        return {"loss": last, f"loss of tokens seen 1 to {RARE} times": float(model(chosen, labels[chosen]))}


def _last(losses: list[float]) -> float:
    return statistics.fmean(losses[-max(1, len(losses) // 10) :])


def compare(name: str, run: Callable[[int, int, States, str], dict[str, float]], steps: int, seeds: int, tier: str) -> None:
    """Prints a row for each measure: every seed, and what the means differ by."""
    begun = time.perf_counter()
    found: dict[States, list[dict[str, float]]] = {states: [] for states in KINDS}
    for seed in range(seeds):
        for states in KINDS:
            found[states].append(run(seed, steps, states, tier))
            print(f"  {name}, seed {seed}, {states}: {found[states][-1]}, {time.perf_counter() - begun:.0f} s", flush=True)
    for measure in found["exact"][0]:
        values = {states: [result[measure] for result in results] for states, results in found.items()}
        spread = statistics.stdev(values["exact"]) if seeds > 1 else float("nan")
        apart = statistics.fmean(values["lean"]) - statistics.fmean(values["exact"])
        shown = {states: ", ".join(f"{value:.4f}" for value in row) for states, row in values.items()}
        print(
            f"| {name}, {steps} steps: {measure} | {shown['exact']} | {shown['lean']} | {apart:+.4f} | {spread:.4f} |",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", choices=["text", "rare"])
    parser.add_argument("--tier", choices=["device", "host"], default="host")
    chosen = parser.parse_args()
    print(
        "| task | exact, by seed | lean, by seed | lean - exact, of means | spread of exact over seeds |\n|---|---|---|---|---|"
    )
    for name, run in (("rare", rare), ("text", text)):
        if chosen.only in (None, name):
            compare(name, run, chosen.steps, chosen.seeds, chosen.tier)


if __name__ == "__main__":
    main()
