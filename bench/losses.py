"""Whether the engines of a run trained the same model.

[Note: tolerance] All engines start from the same bf16 weights and see the same tokens, so only the order of sums and the
rounding to bf16 (relative 2^-9 per operation; a loss averages it over all tokens) tell them apart. A first loss may differ by
``FORWARD`` of its size. Updates carry such differences on in proportion to what was learned: ``LEARNED`` of the fall of the
loss so far. A skipped or doubled update or another learning rate is outside after a few steps. AdamW divides by the gradient's
size, so a gradient that is wrong by a constant factor is not noticed.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

FORWARD = 2e-3
LEARNED = 0.05

TEXT = f"""\
Losses agree when each step's loss is within {FORWARD:g} of the first loss plus {LEARNED:g} of what the loss has fallen by
then, against the first engine of the same case that finished: all start from the same bf16 weights and tokens, and the rest
is rounding."""


def case_of(row: Mapping[str, Any]) -> tuple[Any, ...]:
    """Rows of one case train the same."""
    return tuple(row[key] for key in ("shape", "batch", "seq", "world", "clip"))


def disagreements(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """A sentence for each engine whose losses are not those of the first finished engine of its case."""
    groups: defaultdict[tuple[Any, ...], list[Mapping[str, Any]]] = defaultdict(list)
    for row in rows:
        if row["status"] == "ok":
            groups[case_of(row)].append(row)
    found = []
    for first, *others in groups.values():
        for row in (first, *others):
            step = differs_at(row["losses"], first["losses"])
            if step is not None:
                theirs = f"{first['losses'][step]:.5f}" if step < len(first["losses"]) else "no loss"
                own = f"{row['losses'][step]:.5f}" if step < len(row["losses"]) else "no loss"
                found.append(f"{row['shape']}: {row['engine']} has {own} at step {step}, {first['engine']} has {theirs}")
    return found


def differs_at(losses: Sequence[float], reference: Sequence[float]) -> int | None:
    """The first step at which the losses are too far apart (NaN is). None: they agree."""
    for step, (loss, wanted) in enumerate(zip(losses, reference, strict=False)):
        allowed = FORWARD * abs(reference[0]) + LEARNED * abs(reference[0] - wanted)
        if not abs(loss - wanted) <= allowed:
            return step
    return min(len(losses), len(reference)) if len(losses) != len(reference) else None
