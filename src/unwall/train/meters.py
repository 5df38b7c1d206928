"""What a step took and held, read without waiting for anything that is under way."""

import time
from dataclasses import dataclass

import torch

from unwall.runtime.engine import Engine


@dataclass(frozen=True)
class Reading:
    """Bytes per tier, and seconds that each link was waited for since the last reading."""

    live_bytes: dict[str, int]
    peak_bytes: dict[str, int]
    stall_seconds: dict[str, float]
    seconds: float
    allocated_bytes: int | None
    """The most that torch had allocated on the accelerator, activations with it, so far. None: there is none."""


class Meters:
    """Of one rank."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._stalled: dict[str, float] = {}
        self._at = time.perf_counter()
        self.read()

    def start(self) -> None:
        """What came before (an evaluation, a save) is not the next step's."""
        self._at = time.perf_counter()

    def read(self) -> Reading:
        now = time.perf_counter()
        tiers, device = self._engine.tiers, self._engine.device.device
        meters = [*tiers.links.meters.values(), tiers.updates]
        if self._engine.ranks.meter is not None:
            meters.append(self._engine.ranks.meter)
        total = {meter.name: meter.read().stall_seconds for meter in meters}
        stalls = {name: seconds - self._stalled.get(name, 0.0) for name, seconds in total.items()}
        self._stalled = total
        taken, self._at = now - self._at, now
        return Reading(
            {str(name): ledger.live_bytes for name, ledger in tiers.ledgers.items()},
            {str(name): ledger.peak_bytes for name, ledger in tiers.ledgers.items()},
            {name: round(seconds, 6) for name, seconds in stalls.items() if seconds > 0},
            taken,
            torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None,
        )
