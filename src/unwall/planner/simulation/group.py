"""A group whose bytes do not move: fetching it takes time on a virtual clock."""

from unwall.planner.pace import DISK_READ, FETCH, GATHER
from unwall.planner.simulation.clock import Task
from unwall.planner.simulation.rank import VirtualRank
from unwall.shards.group import Residence
from unwall.shards.placement import RING_SLOT_BYTES, replica_bytes_on, transit_bytes_of


class SimulatedGroup:
    """What the executor drives in the place of ``shards.group.Group``, with the same account of the device."""

    def __init__(self, index: int, rank: VirtualRank) -> None:
        unit, layout = rank.job.planned[index]
        self.index = index
        self.name = unit.name or unit.entries[0].name
        self.size, self.home = rank.job.sizes[index], rank.job.homes[index]
        self.gathered_numel = layout.padded_numel
        self.parts = 0
        """Of its gradient, that are told apart: each is computed at another place of a pass."""
        flat_is_home = self.home.params == "device" and self.size.whole
        self.fetch_bytes = 0 if flat_is_home or self.home.resident else self.size.flat_bytes
        self.transit_bytes = transit_bytes_of(self.size, self.home)
        self.updated_in_place = flat_is_home and (rank.alone or rank.job.plan.stage == 0)
        self.residence = Residence.RESIDENT if flat_is_home else Residence.ABSENT
        self.arrival: Task | None = None
        """What brings the parameters: whoever computes with them comes after it."""
        self.update: Task | None = None
        self._rank = rank
        self._gathers = not rank.alone and not (self.home.tier == "host" and rank.job.plan.stage == 0)
        rank.ledger.reserve(self._fixed_bytes(), f"states of {self.name}")

    def _fixed_bytes(self) -> int:
        """Device memory that is held all the time."""
        kept = self.size.residual_bytes + replica_bytes_on("device", self.size, self.home)
        if self.home.tier == "device":
            return kept + (self.size.flat_bytes if self.size.whole else self.size.shard_bytes) + self.size.state_bytes
        return kept + (self.size.flat_bytes if self.home.resident else 0)

    @property
    def param_count(self) -> int:
        return self.parts

    @property
    def updating(self) -> bool:
        return self.update is not None and not self.update.done

    @property
    def undecided(self) -> bool:
        return False

    def begin_gather(self) -> None:
        rank = self._rank
        if self.update is not None:
            rank.clock.wait(self.update)
            self.update = None
        rank.ledger.reserve(self.fetch_bytes, f"parameters of {self.name}")
        # With a budget the memory is what another group had, whose last reader may still be at work.
        arrival = None if rank.ledger.budget_bytes is None else rank.computed
        if self.home.tier == "host":
            arrival = self._bring(arrival)
        if self._gathers:
            moved_bytes = self.transit_bytes or self.size.flat_bytes
            if self.transit_bytes:
                arrival = rank.compute(rank.pace.packing_s(self.gathered_numel / rank.job.ranks, 0), [arrival])
            arrival = rank.submit(GATHER, rank.collective_s(moved_bytes), [arrival], f"gather {self.index}")
            rank.ledger.reserve(self.transit_bytes, f"parameters of {self.name} on their way")
        self.arrival = arrival
        self.residence = Residence.ARRIVING
        rank.gathers += 1

    def _bring(self, after: Task | None) -> Task:
        rank, nbytes = self._rank, self.size.shard_bytes
        rate = rank.pace.ceilings.host_to_device_bytes_per_s
        if self.home.params != "disk":
            return rank.submit(FETCH, nbytes / rate, [after], "fetch")
        # Chunk by chunk through a ring: only the last chunk's copy comes after the reads.
        last = min(nbytes, RING_SLOT_BYTES)
        read = rank.submit(DISK_READ, nbytes / rank.pace.ceilings.disk_read_bytes_per_s, [after], "read")
        rank.submit(FETCH, (nbytes - last) / rate, [after], "fetch")
        return rank.submit(FETCH, last / rate, [read], "fetch the last chunk")

    near = False
    """Second copies inside nodes are counted, but not their time: the planner knows one speed between ranks."""

    def outdated(self) -> None: ...

    begin_near = begin_gather

    def serve_near(self) -> None: ...

    def serve_gather(self) -> None:
        """Ranks that are alike want a group at the same time: this one has it, so no other needs it."""

    def finish_gather(self) -> None:
        self._arrived()
        if self.transit_bytes and self._gathers:
            self.arrival = self._rank.compute(self._rank.pace.packing_s(0, self.gathered_numel), [self.arrival])
        self.residence = Residence.RESIDENT

    def _arrived(self) -> None:
        if self.residence is Residence.ARRIVING and self._gathers:
            self._rank.ledger.release(self.transit_bytes)

    def drop(self) -> None:
        self._arrived()
        self.residence = Residence.ABSENT
        self.arrival = None
        self._rank.ledger.release(self.fetch_bytes)
