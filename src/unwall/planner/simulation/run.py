"""Drives the engine's executor through some steps of a job, as the engine's hooks would. See [Note: the same decisions]."""

from collections.abc import Mapping
from dataclasses import dataclass

from unwall.planner.activations import inside_shares
from unwall.planner.job import Job
from unwall.planner.outline import passes_of
from unwall.planner.pace import COMPUTE, Pace
from unwall.planner.simulation.checkpoints import Checkpoints
from unwall.planner.simulation.gradient import SimulatedGradient
from unwall.planner.simulation.group import SimulatedGroup
from unwall.planner.simulation.rank import NobodyWatches, RanksAlike, VirtualRank
from unwall.planner.simulation.update import measure_norm, submit_update
from unwall.planner.traffic import Traffic
from unwall.schedule.executor import Executor

STEPS = 2
"""Steps that are simulated; the last one counts. It meets the updates of the first; a third would be like it."""

PASSES = 3
"""At most so many of the passes before a step are simulated: those between the first and the last are alike."""


@dataclass(frozen=True)
class Simulated:
    """What the last simulated step took."""

    step_s: float
    busy_s: Mapping[str, float]
    """Work of each queue in a step, were nothing in its way."""
    device_peak_bytes: int
    gathers: int
    """Groups that were fetched or gathered in the step."""
    traffic: Traffic
    """What came from other ranks in the passes of the step that are simulated."""


class Simulation:
    """One rank's steps. BudgetError where the device budget does not hold what is in use at once."""

    def __init__(self, job: Job, pace: Pace) -> None:
        self.job = job
        self.rank = VirtualRank(job, pace)
        self.groups = [SimulatedGroup(index, self.rank) for index in range(len(job.sizes))]
        self.gradients = [SimulatedGradient(group, self.rank) for group in self.groups]
        self.executor = Executor(self.groups, self.gradients, self.rank.ledger, job.ranks, NobodyWatches(), RanksAlike)
        self._early = job.early
        self._updated: set[int] = set()
        """Groups that were updated before the step."""
        self._last_pass = False
        self._checkpoints = Checkpoints(self.rank)
        self._places = passes_of(job.stretches, job.activations.repeats)
        self._seconds = self._compute_s(pace)
        self._last_backward = {
            index: place
            for place, (stretch, what) in enumerate(self._places)
            if what == "backward"
            for index in job.stretches[stretch].groups
        }
        self._parts: dict[tuple[int, int], int] = {}
        """By group and place: which part of the group's gradient is computed there."""
        for place, (stretch, what) in enumerate(self._places):
            for index in job.stretches[stretch].groups if what == "backward" else ():
                self._parts[index, place] = self.groups[index].parts
                self.groups[index].parts += 1
        self._teach()

    def _compute_s(self, pace: Pace) -> list[float]:
        """For each place."""
        load, found = self.job.workload, []
        shares = inside_shares(self.job.outline.description) if load.sequence_tiles > 1 else []
        for number, what in self._places:
            stretch = self.job.stretches[number]
            seconds = pace.compute_s(stretch, load.batch, load.seq, what)
            if shares and what == "backward" and stretch.block is not None:  # MLPs once more
                seconds *= 1 + shares[stretch.block] / 2
            found.append(seconds)
        return found

    def _teach(self) -> None:
        """The trace knows the order from the start, as after a first step."""
        self.executor.trace.begin(True)
        for stretch, _ in self._places:
            for index in self.job.stretches[stretch].groups:
                self.executor.trace.record(index)

    def run(self) -> Simulated:
        """Some steps; the last one counts."""
        passes = min(PASSES, self.job.workload.passes)
        more = self.job.workload.passes - passes
        rank, clock, seconds = self.rank, self.rank.clock, 0.0
        for _ in range(STEPS):
            begin, clock.busy_s, rank.gathers = clock.now_s, {}, 0
            rank.traffic = Traffic()
            rank.ledger.reset_peak()
            middle_s, middle_busy_s = 0.0, {}
            for number in range(passes):
                if number == 1 and more:
                    clock.drain(COMPUTE)
                start, busy_s = clock.now_s, dict(clock.busy_s)
                self._pass(last=number == passes - 1)
                if number == 1 and more:
                    clock.drain(COMPUTE)
                    middle_s = clock.now_s - start
                    middle_busy_s = {queue: total - busy_s.get(queue, 0.0) for queue, total in clock.busy_s.items()}
            self._step()
            seconds = clock.now_s - begin + more * middle_s
            for queue, busy in middle_busy_s.items():
                clock.busy_s[queue] += more * busy
        return Simulated(seconds, dict(clock.busy_s), rank.ledger.peak_bytes, rank.gathers, rank.traffic)

    def _pass(self, last: bool) -> None:
        """One forward and backward. Groups are pinned as [Note: pins] in runtime/backward.py says."""
        executor, self._last_pass = self.executor, last
        executor.unpin_all()
        executor.trace.begin(True)
        for place, (number, what) in enumerate(self._places):
            stretch = self.job.stretches[number]
            reads = stretch.groups if what == "backward" else ()
            executor.pins.being_read = lambda reads=reads: reads  # type: ignore[misc]
            for index in stretch.groups:
                if what in ("begin", "backward") or executor.pins.is_soft(index):
                    executor.pin(index)
                else:
                    executor.use(index)
                    executor.release(index)
            if what == "begin":
                continue
            arrivals = [self.groups[index].arrival for index in stretch.groups]
            kept = self._checkpoints.step(stretch.block, what)
            self.rank.compute(self._seconds[place], [*arrivals, kept])
            executor.pins.being_read = tuple
            if what == "backward":
                for index in stretch.groups:
                    self._take_gradient(index, place)
                    if self._last_backward[index] == place:
                        if self.gradients[index].pending:
                            executor.reduce(index)
                            self._hand_out()
                        executor.pins.give_up(index)
        executor.end_pieces()

    def _take_gradient(self, index: int, place: int) -> None:
        gradient = self.gradients[index]
        if self.job.sizes[index].trainable:
            if not gradient.pending:
                self.executor.make_room_before(gradient.flat_bytes, keep=index)
                self.executor.make_room(gradient.flat_bytes, f"gradients of {self.groups[index].name}", keep=index)
            gradient.take(self._parts[index, place])

    def _hand_out(self) -> None:
        """Sums that are on their way to where the update runs are used at once where nothing has to be waited for."""
        for index in self.executor.take_reduced():
            if self._last_pass and index in self._early:
                self.groups[index].update = submit_update(self.rank, index, [self.gradients[index].landing])
                self._updated.add(index)

    def _step(self) -> None:
        self.executor.finish_reduces(departed=False)
        self.executor.take_reduced()
        norm = None
        if self.job.workload.clip:
            norm = measure_norm(self.rank, [gradient.landing for gradient in self.gradients])
        trained = [index for index, size in enumerate(self.job.sizes) if size.trainable]
        for index in trained:
            if index not in self._updated:
                self.groups[index].update = submit_update(self.rank, index, [self.gradients[index].landing, norm])
        self._updated.clear()
        for index in trained:
            self.gradients[index].clear()
            self.executor.invalidate(index)
        self.rank.clock.drain(COMPUTE)
