"""A group's gradient whose bytes do not move: what it takes of the device, and when it is where the update runs."""

from unwall.planner.pace import DISK_READ, DISK_WRITE, LAND, UPDATE
from unwall.planner.simulation.clock import Task
from unwall.planner.simulation.group import SimulatedGroup
from unwall.planner.simulation.rank import VirtualRank
from unwall.planner.traffic import Traffic, of_reduction, ranks_per_node


class SimulatedGradient:
    """What the executor drives in the place of ``shards.gradient.Gradient``: what is taken and given back, in its order."""

    def __init__(self, group: SimulatedGroup, rank: VirtualRank) -> None:
        self.group = group
        self.pending: set[int] = set()
        """Parts of it that are here. In the engine: parameters."""
        self.present: set[int] = set()
        self.elsewhere: set[int] = set()
        """None: the ranks are alike."""
        self.passes = 0
        """Passes that were reduced since the last step; pieces of one count once."""
        self.leaves = group.home.tier == "host"
        self.landing: Task | None = None
        """What brings the sum to where the update runs."""
        self._rank = rank
        self._label = f"gradients of {group.name}"
        self._keeps_flat = rank.job.plan.stage < 2 and not rank.alone and not self.leaves
        """The sum lies in the flat buffer (stages 0 and 1)."""
        self._held_bytes = 0
        """Device memory of the sum that an update will read."""
        self._widened = False
        """The sum is in fp32, in memory of its own."""
        self._reducing = False
        self._unpacks = 0
        """Elements of what is under way that are still to be unpacked. Where it leaves the device they count as unpacked when
        it is sent: nobody waits here for them to arrive."""
        self._arrival: Task | None = None
        """What brings the sum to this rank's device, where it stays there."""
        self._piece = False
        """What is under way belongs to a pass of which another piece was reduced before."""

    @property
    def held(self) -> bool:
        return self.passes > 0

    @property
    def flat_bytes(self) -> int:
        flat = 0 if self.pending else self._flat_bytes()
        return flat + self.group.size.grad_part_bytes + self._widening_bytes()

    @property
    def reduce_bytes(self) -> int:
        size = self.group.size
        grows = 4 * size.own_numel if size.widening_bytes and not self.leaves else 0
        return size.grad_flat_bytes + size.grad_part_bytes + grows

    def take(self, part: int) -> None:
        """Backward has computed gradients of the group."""
        if self.pending:
            self.pending.add(part)
            return
        self.finish_reduce()  # of a piece before
        if self._keeps_flat:  # the sum moves out of the flat buffer, which stays
            self._widen(keep_bytes=self._held_bytes)
        self._rank.ledger.reserve(self._flat_bytes(), self._label)
        self.pending = {part}

    def _flat_bytes(self) -> int:
        return 0 if self._keeps_flat and self.passes else self.group.size.grad_flat_bytes

    def _widening_bytes(self) -> int:
        """Device memory that the sum takes in fp32, before a second pass is added to it."""
        size = self.group.size
        if not self.passes or self.leaves or self._widened or not (size.widening_bytes or self._keeps_flat):
            return 0
        return 4 * size.own_numel

    def begin_reduce(self, present: set[int], contribute: bool = True) -> None:  # noqa: ARG002 (the protocol's signature)
        rank, size = self._rank, self.group.size
        self._piece = self.passes > 0 and self.present.isdisjoint(present)
        self.present |= present
        self.pending = set()
        self._reducing = True
        # Each finished gradient was copied into the flat buffer: read once, written once.
        seconds = 2 * size.grad_flat_bytes / rank.pace.device_memory_bytes_per_s
        if not rank.alone:
            rank.ledger.reserve(size.grad_part_bytes, self._label)
            after = self._travel(seconds)
        else:
            after = rank.compute(seconds)
        if self.leaves:
            self.landing = self._land(after)

    def _travel(self, seconds: float) -> Task:
        """Over the ranks, after ``seconds`` of compute; inside the node first, where gradients take two hops."""
        rank, size, name = self._rank, self.group.size, f"reduce {self.group.index}"
        moved, numel = of_reduction(size, rank.job.plan, rank.job.ranks), self.group.gathered_numel
        if moved.near:
            inside = rank.travel(Traffic(near=moved.near), rank.compute(seconds), name)
            if rank.pace.blocking:
                rank.clock.wait(inside)
            numel //= ranks_per_node(rank.job.plan, rank.job.ranks)
            seconds, after = 0.0, [inside]
        else:
            after = []
        if size.exchange_bytes:
            self._unpacks = 0 if self.leaves else numel
            seconds += rank.pace.packing_s(numel, numel - self._unpacks, noise=True)
        found = rank.travel(Traffic(moved.everyone, 0.0, moved.across), rank.compute(seconds, after), name)
        self._arrival = None if self.leaves else found
        return found

    def _land(self, after: Task) -> Task:
        """The sum goes to the tier where the update reads it, and is added there to what landed before."""
        rank, size, index, again = self._rank, self.group.size, self.group.index, self.passes > 0 and not self._piece
        rates = rank.pace.ceilings
        landed = rank.submit(LAND, size.landing_bytes / rates.device_to_host_bytes_per_s, [after], f"land {index}")
        wide_bytes = size.grad_bytes + size.widening_bytes
        if self.group.home.grads == "disk":
            if again:
                landed = rank.submit(DISK_READ, wide_bytes / rates.disk_read_bytes_per_s, [landed], f"sum {index}")
            written = wide_bytes if again else size.grad_bytes
            return rank.submit(DISK_WRITE, written / rates.disk_write_bytes_per_s, [landed], f"keep {index}")
        if again:
            traffic = size.grad_bytes + 2 * wide_bytes
            landed = rank.submit(UPDATE, traffic / rates.host_memory_bytes_per_s, [landed], f"add {index}")
            if rank.pace.blocking:
                rank.clock.wait(landed)
        return landed

    def finish_reduce(self) -> None:
        if not self._reducing:
            return
        self._reducing = False
        size, ledger = self.group.size, self._rank.ledger
        if self._arrival is not None:  # the device waits: at stage 0 no gather of the next step would
            self._rank.compute(self._rank.pace.packing_s(0, self._unpacks), [self._arrival])
            self._unpacks, self._arrival = 0, None
        incoming = size.grad_flat_bytes if self._rank.alone else size.grad_part_bytes
        if not self._rank.alone and not self._keeps_flat:
            ledger.release(size.grad_flat_bytes)
        if self.leaves:
            ledger.release(incoming)
        elif self._keeps_flat:
            ledger.release(incoming)
            self._held_bytes = self._held_bytes or size.grad_flat_bytes
        elif not self.passes:  # what was packed goes
            ledger.release(incoming - size.grad_bytes)
            self._held_bytes = size.grad_bytes
        else:
            if not self._piece:
                self._widen()
            ledger.release(incoming)
        self.passes += not self._piece

    def _widen(self, keep_bytes: int = 0) -> None:
        """The sum moves into fp32 memory of its own, to add further passes to."""
        wide_bytes = self._widening_bytes()
        if wide_bytes:
            self._rank.ledger.reserve(wide_bytes, self._label)
            self._rank.ledger.release(self._held_bytes - keep_bytes)
            self._held_bytes = wide_bytes + keep_bytes
            self._widened = True

    def await_departure(self) -> None:
        if self.landing is not None:
            self._rank.clock.wait(self.landing)

    def clear(self) -> None:
        """After the step."""
        self._rank.ledger.release(self._held_bytes)
        self._held_bytes = self.passes = 0
        self.present.clear()
        self._widened = False
        self.landing = None
