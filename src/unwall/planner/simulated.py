"""What a simulated rank does with gradients, states and activation checkpoints once they have left the device."""

from collections.abc import Sequence
from typing import Protocol

from unwall.planner.clock import Clock, Task
from unwall.planner.job import Job
from unwall.planner.pace import DISK_READ, DISK_WRITE, FETCH, LAND, UPDATE, Pace, update_bytes
from unwall.shards.placement import CHUNK_ELEMENTS, CHUNKS_IN_FLIGHT

PIECES = 8
"""A group whose state is on disk is updated in chunks; so many pieces of it are simulated, at most."""


class Rank(Protocol):
    """What these functions need of the simulation."""

    job: Job
    pace: Pace
    clock: Clock
    last_update: Task | None

    def submit(self, queue: str, seconds: float, after: Sequence[Task | None] = (), name: str = "") -> Task: ...

    def compute(self, seconds: float, after: Sequence[Task | None] = ()) -> Task: ...


def land(rank: Rank, index: int, after: Task, again: bool) -> Task:
    """A reduced gradient goes to the tier where the update reads it. ``again``: it is added to what landed before."""
    size, home, rates = rank.job.sizes[index], rank.job.homes[index], rank.pace.ceilings
    landed = rank.submit(LAND, size.grad_bytes / rates.device_to_host_bytes_per_s, [after], f"land {index}")
    wide_bytes = size.grad_bytes + size.widening_bytes
    if home.grads == "disk":
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


def measure_norm(rank: Rank, landings: Sequence[Task | None]) -> Task | None:
    """The norm of all gradients. An accelerator measures each one before it leaves."""
    held = [size.grad_bytes for size in rank.job.sizes]
    if not rank.pace.blocking:
        return rank.compute(sum(held) / rank.pace.device_memory_bytes_per_s)
    task = rank.submit(UPDATE, sum(held) / rank.pace.ceilings.host_memory_bytes_per_s, landings, "norm")
    rank.clock.wait(task)
    return task


def submit_update(rank: Rank, index: int, after: Sequence[Task | None]) -> Task | None:
    """One group's update. The task that ends it, or None where the device does it in order."""
    size, home, rates = rank.job.sizes[index], rank.job.homes[index], rank.pace.ceilings
    traffic = size.own_numel * update_bytes(rank.job.planned[index][1].dtype)
    if home.tier == "device":
        if not rank.pace.blocking:
            rank.compute(traffic / rank.pace.device_memory_bytes_per_s)
        else:
            rank.clock.wait(rank.submit(UPDATE, traffic / rates.host_memory_bytes_per_s, after, f"update {index}"))
        return None
    seconds = traffic / rates.host_memory_bytes_per_s
    params = size.shard_bytes if home.params == "disk" else 0
    states = size.state_bytes if home.states == "disk" else 0
    grads = 0
    if home.grads == "disk":
        grads = size.grad_bytes + (size.widening_bytes if rank.job.workload.passes > 1 else 0)
    after = [*after, rank.last_update]
    if not params + states + grads:
        rank.last_update = rank.submit(UPDATE, seconds, after, f"update {index}")
        return rank.last_update
    read_s = (params + states + grads) / rates.disk_read_bytes_per_s
    write_s = (params + states) / rates.disk_write_bytes_per_s if params + states else 0.0
    rank.last_update = _through_chunks(rank, index, (read_s, seconds, write_s), after)
    return rank.last_update


def _through_chunks(rank: Rank, index: int, seconds: tuple[float, float, float], after: Sequence[Task | None]) -> Task:
    """Read, updated and written piece by piece, a bounded number of them at once."""
    pieces = max(1, min(PIECES, rank.job.sizes[index].own_numel // CHUNK_ELEMENTS))
    read_s, update_s, write_s = (part / pieces for part in seconds)
    ahead = max(1, min(pieces, CHUNKS_IN_FLIGHT) - 1)
    written: list[Task] = []
    for number in range(pieces):
        waits = [*after, written[number - ahead] if number >= ahead else None]
        read = rank.submit(DISK_READ, read_s, waits, f"read {index}")
        updated = rank.submit(UPDATE, update_s, [read], f"update {index}")
        written.append(rank.submit(DISK_WRITE, write_s, [updated], f"write {index}"))
    return written[-1]


class Checkpoints:
    """Activation checkpoints that are kept on the host: out after a block's forward, back one block ahead of its backward."""

    def __init__(self, rank: Rank) -> None:
        self._rank = rank
        load, described = rank.job.workload, rank.job.outline.description
        total = described.checkpoint_bytes(load.batch, load.seq) if load.activations == "host" and described.blocks else 0.0
        self._block_bytes = total / max(1, described.blocks)
        self._last: tuple[int | None, str] = (None, "")
        self._back: dict[int, Task] = {}

    def step(self, block: int | None, what: str) -> Task | None:
        """Before a segment computes. What it must wait for."""
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
