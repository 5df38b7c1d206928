"""A group whose bytes do not move: fetching it takes time on a virtual clock."""

from unwall.planner.pace import DISK_READ, FETCH, LAND
from unwall.planner.simulation.clock import Task
from unwall.planner.simulation.rank import VirtualRank
from unwall.planner.traffic import has_replica, of_gather, of_near_gather
from unwall.shards.group import Residence
from unwall.shards.home import replica_bytes_on
from unwall.shards.working import RING_SLOT_BYTES, transit_bytes_of


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
        self._replicated = self._gathers and has_replica(self.size, self.home)
        self.near = False
        """The second copy inside the node holds what the parameters are now."""
        self._in_transit = 0
        """Bytes that packed parameters take on their way."""
        self._fills = False
        """What is under way fills the second copy."""
        self._filling: Task | None = None
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
            if self.transit_bytes:
                arrival = rank.compute(rank.pace.packing_s(self.gathered_numel / rank.job.ranks, 0), [arrival])
            arrival = rank.travel(of_gather(self.size, self.home, rank.job.ranks), arrival, f"gather {self.index}")
            self._in_transit = self.transit_bytes
            rank.ledger.reserve(self._in_transit, f"parameters of {self.name} on their way")
            self._fills = self._replicated and not self.near
            self.near = self._replicated
        self.arrival = arrival
        self.residence = Residence.ARRIVING
        rank.gathers += 1

    def begin_near(self) -> None:
        """From the second copy inside the node, as it is."""
        rank = self._rank
        rank.ledger.reserve(self.fetch_bytes, f"parameters of {self.name}")
        arrival = None if rank.ledger.budget_bytes is None else rank.computed
        if self.home.replica == "host":
            rate = rank.pace.ceilings.host_to_device_bytes_per_s
            arrival = rank.submit(FETCH, self.size.replica_bytes / rate, [arrival, self._filling], "fetch")
        self.arrival = rank.travel(of_near_gather(self.size, rank.job.plan, rank.job.ranks), arrival, f"gather {self.index}")
        self.residence = Residence.ARRIVING
        rank.gathers += 1

    def _fill(self) -> None:
        """The second copy is made of what arrived."""
        rank, nbytes = self._rank, self.size.replica_bytes
        self._fills = False
        if self.home.replica == "host":
            seconds = nbytes / rank.pace.ceilings.device_to_host_bytes_per_s
            self._filling = rank.submit(LAND, seconds, [self.arrival], "second copy")
        else:
            self.arrival = rank.compute(2 * nbytes / rank.pace.device_memory_bytes_per_s, [self.arrival])

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

    def outdated(self) -> None:
        self.near = False

    def serve_near(self) -> None: ...

    def serve_gather(self) -> None:
        """Ranks that are alike want a group at the same time: this one has it, so no other needs it."""

    def finish_gather(self) -> None:
        packed = self._in_transit > 0
        self._arrived()
        if packed:
            self.arrival = self._rank.compute(self._rank.pace.packing_s(0, self.gathered_numel), [self.arrival])
        if self._fills:
            self._fill()
        self.residence = Residence.RESIDENT

    def _arrived(self) -> None:
        if self.residence is Residence.ARRIVING:
            self._rank.ledger.release(self._in_transit)
            self._in_transit = 0

    def drop(self) -> None:
        self._arrived()
        self.residence = Residence.ABSENT
        self.arrival = None
        self._rank.ledger.release(self.fetch_bytes)
