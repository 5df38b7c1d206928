"""What a plan would gain by keeping fewer bytes per parameter. It changes what is promised, so it is said and not done."""

import dataclasses
from collections.abc import Iterator

import torch

from unwall.planner.candidates import Candidate
from unwall.planner.search import Search, Tried
from unwall.planner.words import seconds

WORTH = 1.1
"""A step must get faster by as much to be mentioned."""
LEAN = "states='lean' (5 bytes of states per parameter instead of 12, docs/lean.md)"
TRANSIENT = "grads='transient' and AdamW(update_in_backward=True) (gradients are not kept; no clipping, one backward per step)"


def leaner(candidate: Candidate, ranks: int, dtype: torch.dtype) -> Iterator[tuple[str, Candidate]]:
    """The same placement with fewer bytes per parameter, and what one writes for it."""
    if dtype is torch.bfloat16 and "states" not in candidate.fields:
        yield LEAN, dataclasses.replace(candidate, fields={**candidate.fields, "states": "lean"})
    if ranks == 1 and candidate.workload.passes == 1 and dtype is not torch.float16:  # as Plan refuses it
        fields = {name: value for name, value in candidate.fields.items() if name != "grads"} | {"grads": "transient"}
        load = dataclasses.replace(candidate.workload, clip=False, update_in_backward=True)
        yield TRANSIENT, dataclasses.replace(candidate, fields=fields, workload=load)


def with_fewer_bytes(search: Search, best: Tried) -> list[str]:
    """Where states go to a drive, and less on it would be faster."""
    if not best.prediction.tier_bytes("disk"):
        return []
    found = []
    for words, candidate in leaner(best.candidate, search.ranks, search.dtype):
        made = search.look(candidate)
        if isinstance(made, Tried) and made.prediction.step_s * WORTH <= best.prediction.step_s:
            found.append(f"with {words} a step would take {seconds(made.prediction.step_s)}")
    return found
