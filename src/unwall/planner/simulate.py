"""A step on a virtual clock: the executor's decisions, with time instead of bytes.

[Note: the same decisions]
What is dropped and what is fetched ahead is decided by ``schedule/residency.py``, as in the engine, with the same look-ahead
and the same number of reductions in flight. The account of the device follows the engine, too: what is taken and given back,
in its order. Only the actions differ: they put work into the queues of a clock.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from unwall.planner.clock import Clock, Task
from unwall.planner.job import Job
from unwall.planner.order import Order
from unwall.planner.outline import passes_of
from unwall.planner.pace import COMPUTE, DISK_READ, FETCH, GATHER, Pace
from unwall.planner.simulated import Checkpoints, land, measure_norm, submit_update
from unwall.schedule.executor import LOOK_AHEAD, REDUCES_IN_FLIGHT
from unwall.schedule.residency import Held, choose_drops, next_missing
from unwall.shards.placement import RING_SLOT_BYTES

STEPS = 2
"""Simulated; the last one counts. It meets the updates of the first; a third would be like it."""

PASSES = 3
"""Simulated of those before a step, at most: those between the first and the last are alike."""


class NoRoomError(Exception):
    """What is in use at once exceeds the device budget."""


@dataclass(frozen=True)
class Simulated:
    """What the last simulated step took."""

    step_s: float
    busy_s: Mapping[str, float]
    """Work of each queue in a step, were nothing in its way."""
    device_peak_bytes: int
    gathers: int
    """Groups that were fetched or gathered in the step."""


class _Group:
    """What the executor knows of a group."""

    def __init__(self) -> None:
        self.pins = 0
        self.arrival: Task | None = None
        self.landing: Task | None = None
        self.update: Task | None = None
        self.grad_bytes = 0
        """Device memory of the gradient that an update will read."""
        self.grad_flat = False
        """The gradient of this pass has memory."""
        self.passes = 0
        """Whose gradients are in."""


class Simulation:
    """One rank. See [Note: the same decisions]."""

    def __init__(self, job: Job, pace: Pace) -> None:
        self.job, self.pace = job, pace
        self.clock = Clock(pace.limits())
        self.loads = pace.loads()
        self.peak_bytes = 0
        self._early = job.early
        self._gathers = 0
        self._groups = [_Group() for _ in job.sizes]
        self._fetch_bytes = [self._evictable_bytes(index) for index in range(len(job.sizes))]
        self._present = {index for index in range(len(job.sizes)) if self._flat_is_home(index)}
        self._budget = job.plan.budget_device_bytes
        self._live = sum(self._fixed_bytes(index) for index in range(len(job.sizes)))
        self._reducing: deque[int] = deque()
        self._current = -1
        self._computed: Task | None = None
        self._steps = passes_of(job.segments, job.workload.recompute)
        self._last_backward: dict[int, int] = {}
        uses: list[int] = []
        for place, (segment, what) in enumerate(self._steps):
            for group_index in job.segments[segment].groups:
                if not uses or uses[-1] != group_index:
                    uses.append(group_index)
                if what == "backward":
                    self._last_backward[group_index] = place
        self._order = Order(uses)
        self._checkpoints = Checkpoints(self)
        self.last_update: Task | None = None
        """One thread updates the host's groups, one after the other."""

    def run(self) -> Simulated:
        """Some steps; the last one counts."""
        passes = min(PASSES, self.job.workload.passes)
        more = self.job.workload.passes - passes
        seconds = 0.0
        for _ in range(STEPS):
            begin, self.clock.busy_s, self._gathers, self.peak_bytes = self.clock.now_s, {}, 0, self._live
            middle_s, middle_busy_s = 0.0, {}
            for number in range(passes):
                if number == 1 and more:
                    self.clock.drain(COMPUTE)
                start, busy_s = self.clock.now_s, dict(self.clock.busy_s)
                self._pass(last=number == passes - 1)
                if number == 1 and more:
                    self.clock.drain(COMPUTE)
                    middle_s = self.clock.now_s - start
                    middle_busy_s = {queue: total - busy_s.get(queue, 0.0) for queue, total in self.clock.busy_s.items()}
            self._step()
            seconds = self.clock.now_s - begin + more * middle_s
            for queue, busy in middle_busy_s.items():
                self.clock.busy_s[queue] += more * busy
        return Simulated(seconds, dict(self.clock.busy_s), self.peak_bytes, self._gathers)

    def submit(self, queue: str, seconds: float, after: Sequence[Task | None] = (), name: str = "") -> Task:
        """Work for the clock."""
        return self.clock.submit(queue, seconds, [task for task in after if task is not None], self.loads.get(queue), name)

    # -- what a group is ----------------------------------------------------------------------------------------------

    def _flat_is_home(self, index: int) -> bool:
        return self.job.homes[index].params == "device" and self.job.sizes[index].whole

    def _evictable_bytes(self, index: int) -> int:
        """Device memory that a fetch takes beyond what is held anyway."""
        return 0 if self._flat_is_home(index) or self.job.homes[index].resident else self.job.sizes[index].flat_bytes

    def _fixed_bytes(self, index: int) -> int:
        """Device memory that is held all the time."""
        size, home = self.job.sizes[index], self.job.homes[index]
        if home.tier == "device":
            return (size.flat_bytes if size.whole else size.shard_bytes) + size.state_bytes
        return size.flat_bytes if home.resident else 0

    def _keeps_flat(self, index: int) -> bool:
        """The gradient's value lies in its flat buffer (stages 0 and 1)."""
        return self.job.plan.stage < 2 and self.job.ranks > 1 and self.job.homes[index].tier == "device"

    # -- the account --------------------------------------------------------------------------------------------------

    def _take(self, nbytes: int) -> None:
        self._live += nbytes
        self.peak_bytes = max(self.peak_bytes, self._live)

    def _held(self) -> list[Held]:
        return [
            Held(index, self._fetch_bytes[index], self._groups[index].pins > 0 or index == self._current)
            for index in self._present
            if self._fetch_bytes[index]
        ]

    def _make_room(self, nbytes: int) -> None:
        for finish in (False, True):
            if finish:
                self._finish_reduces()
            if self._budget is None or self._live + nbytes <= self._budget:
                return
            drops = choose_drops(self._held(), self._order, self._live + nbytes - self._budget)
            if drops is not None:
                for index in drops:
                    self._drop(index)
                return
        raise NoRoomError(f"{nbytes} bytes are needed on the device, {self._live} of {self._budget} are in use")

    # -- parameters ---------------------------------------------------------------------------------------------------

    def _use(self, index: int) -> None:
        new = self._order.record(index)
        self._current = index
        self._groups[index].pins += 1
        if index not in self._present:
            self._fetch(index)
        if new:
            self._work_ahead()

    def _fetch(self, index: int) -> None:
        group, size, home = self._groups[index], self.job.sizes[index], self.job.homes[index]
        if group.update is not None:
            self.clock.wait(group.update)
            group.update = None
        self._make_room(self._fetch_bytes[index])
        self._take(self._fetch_bytes[index])
        # With a budget the memory is what another group had, whose last reader may still be at work.
        group.arrival = None if self._budget is None else self._computed
        if home.tier == "host":
            group.arrival = self._bring(size.shard_bytes, home.params == "disk", group.arrival)
        if self.job.ranks > 1 and not (home.tier == "host" and self.job.plan.stage == 0):
            group.arrival = self.submit(GATHER, self._collective_s(size.flat_bytes), [group.arrival], f"gather {index}")
        self._present.add(index)
        self._gathers += 1

    def _bring(self, nbytes: int, from_disk: bool, after: Task | None) -> Task:
        rate = self.pace.ceilings.host_to_device_bytes_per_s
        if from_disk:  # chunk by chunk through a ring: only the last chunk's copy comes after the reads
            last = min(nbytes, RING_SLOT_BYTES)
            read = self.submit(DISK_READ, nbytes / self.pace.ceilings.disk_read_bytes_per_s, [after], "read")
            self.submit(FETCH, (nbytes - last) / rate, [after], "fetch")
            return self.submit(FETCH, last / rate, [read], "fetch the last chunk")
        return self.submit(FETCH, nbytes / rate, [after], "fetch")

    def _collective_s(self, flat_bytes: int) -> float:
        """All-gather or reduce-scatter: each rank sends all parts but one."""
        return flat_bytes * (self.job.ranks - 1) / self.job.ranks / self.pace.ceilings.collective_bytes_per_s

    def _work_ahead(self) -> None:
        while True:
            found = next_missing(self._order.upcoming(), self._present, LOOK_AHEAD)
            if found is None:
                return
            index, distance = found
            update = self._groups[index].update
            if update is not None and not update.done:
                return
            needed = 0 if self._budget is None else self._fetch_bytes[index] + self._live - self._budget
            drops = choose_drops(self._held(), self._order, needed, sooner_than=distance) if needed > 0 else []
            if drops is None:
                return
            for drop in drops:
                self._drop(drop)
            self._fetch(index)

    def _drop(self, index: int) -> None:
        self._present.discard(index)
        self._groups[index].arrival = None
        self._live -= self._fetch_bytes[index]

    # -- one pass -----------------------------------------------------------------------------------------------------

    def _pass(self, last: bool) -> None:
        load = self.job.workload
        self._order.at, self._current = 0, -1
        open_backward: set[int] = set()
        for place, (number, what) in enumerate(self._steps):
            segment = self.job.segments[number]
            for index in segment.groups:
                if index in open_backward:
                    self._order.record(index)
                else:
                    self._use(index)
                    if what in ("begin", "backward"):
                        open_backward.add(index)
                    else:
                        self._groups[index].pins -= 1
            if what == "begin":
                continue
            arrivals = [self._groups[index].arrival for index in segment.groups]
            kept = self._checkpoints.step(segment.block, what)
            self.compute(self.pace.compute_s(segment, load.batch, load.seq, what), [*arrivals, kept])
            if what == "backward":
                for index in segment.groups:
                    self._take_gradient(index)
                    if self._last_backward[index] == place:
                        self._reduce(index, last)
                        open_backward.discard(index)
                        self._groups[index].pins -= 1

    def compute(self, seconds: float, after: Sequence[Task | None] = ()) -> Task:
        """Work on the device, in order."""
        self._computed = self.submit(COMPUTE, seconds, after, "compute")
        if self.pace.blocking:
            self.clock.wait(self._computed)
        return self._computed

    # -- gradients ----------------------------------------------------------------------------------------------------

    def _wide_bytes(self, index: int) -> int:
        """What a gradient on the device takes once several passes add up in fp32."""
        size = self.job.sizes[index]
        return 4 * size.own_numel if size.widening_bytes or self._keeps_flat(index) else 0

    def _take_gradient(self, index: int) -> None:
        group, size = self._groups[index], self.job.sizes[index]
        if group.grad_flat or not size.trainable:
            return
        second = group.passes == 1 and self.job.homes[index].tier == "device"
        wide = self._wide_bytes(index) if second else 0
        flat = 0 if self._keeps_flat(index) and group.passes else size.grad_flat_bytes
        self._make_room(flat + size.grad_part_bytes + wide)
        if second and self._keeps_flat(index):
            self._take(wide)
            group.grad_bytes += wide
        self._take(flat)
        group.grad_flat = True

    def _reduce(self, index: int, last: bool) -> None:
        size, group = self.job.sizes[index], self._groups[index]
        if not size.trainable:
            return
        self._finish_reduces(leave=REDUCES_IN_FLIGHT - 1)
        # Each finished gradient was copied into the flat buffer: read once, written once.
        after = self.compute(2 * size.grad_flat_bytes / self.pace.device_memory_bytes_per_s)
        if self.job.ranks > 1:
            self._make_room(size.grad_part_bytes)
            self._take(size.grad_part_bytes)
            seconds = self._collective_s(size.grad_flat_bytes) * (2 if self.job.plan.stage == 0 else 1)
            after = self.submit(GATHER, seconds, [after], f"reduce {index}")
        if self.job.homes[index].tier == "host":
            group.landing = land(self, index, after, again=group.passes > 0)
            if last and index in self._early:
                group.update = submit_update(self, index, [group.landing])
        self._reducing.append(index)
        if self.job.ranks == 1 and self.job.homes[index].tier == "device":
            self._finish_reduces()

    def _finish_reduces(self, leave: int = 0, departed: bool = True) -> None:
        while len(self._reducing) > leave:
            index = self._reducing.popleft()
            group, size = self._groups[index], self.job.sizes[index]
            if departed and group.landing is not None:
                self.clock.wait(group.landing)
            group.grad_flat, group.passes = False, group.passes + 1
            several, flat = self.job.ranks > 1, self._keeps_flat(index)
            if several and not flat:
                self._live -= size.grad_flat_bytes
            incoming = size.grad_part_bytes if several else size.grad_flat_bytes
            if self.job.homes[index].tier == "host" or flat:
                self._live -= incoming
                group.grad_bytes = group.grad_bytes or (size.grad_flat_bytes if flat else 0)
            elif group.passes == 1:
                group.grad_bytes = incoming
            else:
                if group.passes == 2 and self._wide_bytes(index):
                    self._take(self._wide_bytes(index))
                    self._live -= group.grad_bytes
                    group.grad_bytes = self._wide_bytes(index)
                self._live -= incoming

    # -- the step -----------------------------------------------------------------------------------------------------

    def _step(self) -> None:
        self._finish_reduces(departed=False)
        norm = measure_norm(self, [group.landing for group in self._groups]) if self.job.workload.clip else None
        for index, group in enumerate(self._groups):
            if self.job.sizes[index].trainable and index not in self._early:
                group.update = submit_update(self, index, [group.landing, norm])
        for index, group in enumerate(self._groups):
            self._live -= group.grad_bytes
            group.grad_bytes = group.passes = group.pins = 0
            group.landing = None
            in_place = self._flat_is_home(index) and (self.job.ranks == 1 or self.job.plan.stage == 0)
            if index in self._present and self.job.sizes[index].trainable and not in_place:
                self._drop(index)
        self.clock.drain(COMPUTE)
