"""One rank on a virtual clock: its queues of work and the account of its device."""

from array import array
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch

from unwall.planner.job import Job
from unwall.planner.pace import COMPUTE, GATHER, NEAR, Pace
from unwall.planner.simulation.clock import Clock, Task
from unwall.planner.traffic import Traffic
from unwall.schedule.backend import Acts
from unwall.shards.control import unpack_bits
from unwall.tiers.ledger import Ledger


class VirtualRank:
    """What its groups, gradients and updates share."""

    def __init__(self, job: Job, pace: Pace) -> None:
        self.job, self.pace = job, pace
        self.clock = Clock(pace.limits())
        self.ledger = Ledger("device", job.state_budget_bytes)
        self.gathers = 0
        """Groups that were fetched or gathered."""
        self.traffic = Traffic()
        """What came from other ranks."""
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

    def travel(self, what: Traffic, after: Task | None, name: str) -> Task:
        """What comes from other ranks: inside the node or not, one queue for each."""
        self.traffic += what
        queue, seconds = (NEAR, what.near_s) if what.near else (GATHER, what.between_s)
        return self.submit(queue, seconds(self.pace.ceilings), [after], name)


class RanksAlike:
    """The agreement of ranks that all do the same at once: what this one wants, every one wants."""

    def __init__(self, acts: Acts) -> None:
        self._acts = acts

    def gather(self, index: int, near: bool = False) -> None:
        self._acts.join_gather(index, near)

    def may_gather_ahead(self, index: int, near: bool = False) -> bool:  # noqa: ARG002 (the protocol's signature)
        return True

    def reduce(self, index: int, bits: tuple[int, ...]) -> None:
        self._acts.join_reduce(index, unpack_bits(bits), contribute=True)

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        return values

    def begin_pass(self, grad: bool) -> None: ...

    def end_forward(self, grad: bool, sync: bool, steady: bool) -> None: ...

    def end_backward(self, sync: bool, steady: bool, pending: bool) -> None: ...

    def end_step(self, steady: bool, meet: bool = False) -> None: ...

    def together(self, what: str) -> None: ...

    def note(self, what: str) -> None: ...

    def prepared(self, what: str) -> AbstractContextManager[None]:  # noqa: ARG002
        return nullcontext()

    def fail(self, error: BaseException | str, spoilt: bool | None = None) -> None: ...

    def fail_for_good(self, error: BaseException, why: str) -> bool:  # noqa: ARG002 (ranks that never fail)
        return False

    def fail_alone(self, error: BaseException, why: str = "") -> bool:  # noqa: ARG002
        return False

    def say(self, values: "array[float]", names: Callable[[], list[str]], advice: str) -> None: ...

    def rejoin(self) -> None: ...

    @property
    def failed(self) -> bool:
        return False

    @property
    def settled(self) -> bool:
        return True


class NobodyWatches:
    """A lane without a time line."""

    watching = False

    def leave(self) -> None: ...

    def enter(self, label: str) -> None: ...
