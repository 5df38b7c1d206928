"""Activations that wait on the host: inputs of blocks, or all that a block has saved."""

from unwall.planner.pace import FETCH, LAND
from unwall.planner.simulation.clock import Task
from unwall.planner.simulation.rank import VirtualRank


class Checkpoints:
    """Out after a block's forward, back one block ahead of its backward."""

    def __init__(self, rank: VirtualRank) -> None:
        self._rank = rank
        found = rank.job.activations
        self._block_bytes = [found.moved_of(block) for block in range(len(found.choices))]
        self._again = [found.repeats(block) for block in range(len(found.choices))]
        self._last: tuple[int | None, str] = (None, "")
        self._back: dict[int, Task] = {}

    def step(self, block: int | None, what: str) -> Task | None:
        """Before a stretch computes. What it must wait for."""
        if block is None:
            return None
        rates, new = self._rank.pace.ceilings, self._last != (block, what)
        self._last = (block, what)
        if new and what == "forward" and self._block_bytes[block]:
            self._rank.submit(LAND, self._block_bytes[block] / rates.device_to_host_bytes_per_s, name=f"checkpoint {block}")
        if what != ("again" if self._again[block] else "backward"):
            return None
        if new:
            for wanted in (block, block - 1):
                if wanted >= 0 and wanted not in self._back and self._block_bytes[wanted]:
                    seconds = self._block_bytes[wanted] / rates.host_to_device_bytes_per_s
                    self._back[wanted] = self._rank.submit(FETCH, seconds, name=f"checkpoint {wanted}")
        return self._back.pop(block, None)
