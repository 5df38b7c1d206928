"""What a virtual rank does at the step: the norm of all gradients, and the update of each group where its states are."""

from collections.abc import Sequence

from unwall.planner.pace import DISK_READ, DISK_WRITE, UPDATE, update_bytes
from unwall.planner.simulation.clock import Task
from unwall.planner.simulation.rank import VirtualRank
from unwall.shards.home import state_bytes_on
from unwall.shards.working import CHUNK_ELEMENTS, CHUNKS_IN_FLIGHT

PIECES = 8
"""A group whose state is on disk is updated in chunks; so many pieces of it are simulated, at most."""


def measure_norm(rank: VirtualRank, landings: Sequence[Task | None]) -> Task | None:
    """The norm of all gradients. An accelerator measures each one before it leaves."""
    held = [size.grad_bytes for size in rank.job.sizes]
    if not rank.pace.blocking:
        return rank.compute(sum(held) / rank.pace.device_memory_bytes_per_s)
    task = rank.submit(UPDATE, sum(held) / rank.pace.ceilings.host_memory_bytes_per_s, landings, "norm")
    rank.clock.wait(task)
    return task


def submit_update(rank: VirtualRank, index: int, after: Sequence[Task | None]) -> Task | None:
    """One group's update. The task that ends it, or None where the device does it in order."""
    size, home, rates = rank.job.sizes[index], rank.job.homes[index], rank.pace.ceilings
    traffic = size.own_numel * update_bytes(rank.job.planned[index][1].dtype, rank.job.plan.lean)
    if home.tier == "device":
        if not rank.pace.blocking:
            rank.compute(traffic / rank.pace.device_memory_bytes_per_s)
        else:
            rank.clock.wait(rank.submit(UPDATE, traffic / rates.host_memory_bytes_per_s, after, f"update {index}"))
        return None
    seconds = traffic / rates.host_memory_bytes_per_s
    params = size.shard_bytes if home.params == "disk" else 0
    states = state_bytes_on("disk", size, home)
    grads = 0
    if home.grads == "disk":
        grads = size.grad_bytes + (size.widening_bytes if rank.job.workload.passes > 1 else 0)
    after = [*after, rank.updated]
    if not params + states + grads:
        rank.updated = rank.submit(UPDATE, seconds, after, f"update {index}")
        return rank.updated
    read_s = (params + states + grads) / rates.disk_read_bytes_per_s
    write_s = (params + states) / rates.disk_write_bytes_per_s if params + states else 0.0
    rank.updated = _through_chunks(rank, index, (read_s, seconds, write_s), after)
    return rank.updated


def _through_chunks(rank: VirtualRank, index: int, seconds: tuple[float, float, float], after: Sequence[Task | None]) -> Task:
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
