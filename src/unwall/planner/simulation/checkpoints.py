"""Activation checkpoints that are kept on the host."""

from unwall.planner.pace import FETCH, LAND
from unwall.planner.simulation.clock import Task
from unwall.planner.simulation.rank import VirtualRank


class Checkpoints:
    """Out after a block's forward, back one block ahead of its backward."""

    def __init__(self, rank: VirtualRank) -> None:
        self._rank = rank
        load, described = rank.job.workload, rank.job.outline.description
        total = described.checkpoint_bytes(load.batch, load.seq) if load.activations == "host" and described.blocks else 0.0
        self._block_bytes = total / max(1, described.blocks)
        self._last: tuple[int | None, str] = (None, "")
        self._back: dict[int, Task] = {}

    def step(self, block: int | None, what: str) -> Task | None:
        """Before a stretch computes. What it must wait for."""
        if block is None or not self._block_bytes:
            return None
        rates, new = self._rank.pace.ceilings, self._last != (block, what)
        self._last = (block, what)
        if new and what == "forward":
            self._rank.submit(LAND, self._block_bytes / rates.device_to_host_bytes_per_s, name=f"checkpoint {block}")
        if what != "again":
            return None
        if new:
            for wanted in (block, block - 1):
                if wanted >= 0 and wanted not in self._back:
                    seconds = self._block_bytes / rates.host_to_device_bytes_per_s
                    self._back[wanted] = self._rank.submit(FETCH, seconds, name=f"checkpoint {wanted}")
        return self._back.pop(block, None)
