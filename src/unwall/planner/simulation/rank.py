"""One rank on a virtual clock: its queues of work and the account of its device."""

from collections.abc import Sequence

from unwall.planner.job import Job
from unwall.planner.pace import COMPUTE, Pace
from unwall.planner.simulation.clock import Clock, Task
from unwall.shards.collectives import Wish
from unwall.tiers.ledger import Ledger


class VirtualRank:
    """What its groups, gradients and updates share."""

    def __init__(self, job: Job, pace: Pace) -> None:
        self.job, self.pace = job, pace
        self.clock = Clock(pace.limits())
        self.ledger = Ledger("device", job.plan.budget_device_bytes)
        self.gathers = 0
        """Groups that were fetched or gathered."""
        self.computed: Task | None = None
        """What the device computes last."""
        self.updated: Task | None = None
        """One thread updates the host's groups, one after the other: the last of them."""
        self._loads = pace.loads()

    @property
    def alone(self) -> bool:
        return self.job.ranks == 1

    def submit(self, queue: str, seconds: float, after: Sequence[Task | None] = (), name: str = "") -> Task:
        """Work for the clock."""
        return self.clock.submit(queue, seconds, [task for task in after if task is not None], self._loads.get(queue), name)

    def compute(self, seconds: float, after: Sequence[Task | None] = ()) -> Task:
        """Work on the device, in order."""
        self.computed = self.submit(COMPUTE, seconds, after, "compute")
        if self.pace.blocking:
            self.clock.wait(self.computed)
        return self.computed

    def collective_s(self, flat_bytes: int) -> float:
        """All-gather or reduce-scatter: each rank sends all parts but one."""
        return flat_bytes * (self.job.ranks - 1) / self.job.ranks / self.pace.ceilings.collective_bytes_per_s


class RanksAlike:
    """Ranks that all do the same at once: what this one wants, every one wants."""

    def __init__(self, size: int) -> None:
        self.size = size

    def announce(self, wish: Wish, phase: int, where: str) -> list[Wish]:  # noqa: ARG002 (the protocol's signature)
        return [wish]


class NobodyWatches:
    """A lane without a time line."""

    def leave(self) -> None: ...

    def enter(self, label: str) -> None: ...
