"""How fast this rank's link to the host is, and what may wait there."""

import time

import torch

from unwall.runtime.engine import Engine
from unwall.schedule.activations import Link
from unwall.tiers.host import available_bytes, local_ranks

TRIED_BYTES = 32 << 20
SHARE = 0.8
"""Of what a copy alone reaches: others use the link and the memory behind it, too."""
HOST_SHARE = 0.5
"""Of what the host has to spare, where the plan names no budget."""
WHOLE_BLOCKS = False
"""Whether all that a block has saved may move on an accelerator, too. It gives the gradients of keeping on an H200, but with
states on the host it is slower than recomputing: updates need the host's memory at the same time (docs/activations.md)."""


def link_of(engine: Engine, flight_bytes: int) -> Link:
    """The link as ``schedule/activations.py`` wants it. Takes some milliseconds."""
    speed = SHARE * _bytes_per_second(engine.device.device)
    fetched = sum(group.fetch_bytes for group in engine.groups if group.home.params != "device") / engine.ranks.size
    whole_blocks = WHOLE_BLOCKS or engine.device.device.type != "cuda"
    return Link(speed, host_bytes_of(engine), flight_bytes, 0.0, fetched / speed, whole_blocks)


def host_bytes_of(engine: Engine) -> int:
    """What activations may take of the host. States come first."""
    budget = engine.tiers.host.ledger.budget_bytes
    spare = int(available_bytes() * HOST_SHARE / local_ranks())
    return max(0, spare if budget is None else min(spare, budget - engine.least_host_bytes))


def _bytes_per_second(device: torch.device) -> float:
    host = torch.empty(TRIED_BYTES, dtype=torch.uint8, pin_memory=device.type == "cuda")
    there = torch.empty(TRIED_BYTES, dtype=torch.uint8, device=device)
    best = 0.0
    for _ in range(3):  # the first one touches the memory
        _wait(device)
        begun = time.perf_counter()
        host.copy_(there, non_blocking=True)
        _wait(device)
        best = max(best, TRIED_BYTES / (time.perf_counter() - begun))
    return best


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
