"""From a job and a machine to numbers: bytes per tier and link, the bound of a step, and the step as it is simulated."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from unwall.planner.activations import flops_of
from unwall.planner.formulas import Bound, StepWork, lower_bound
from unwall.planner.hardware import Hardware
from unwall.planner.job import Job
from unwall.planner.memory import Terms, disk_peak_bytes, host_peak_bytes, terms_of
from unwall.planner.pace import dtype_name, pace_of, update_bytes
from unwall.planner.simulation.run import Simulation
from unwall.planner.traffic import Traffic, has_replica, of_gather, of_near_gather, of_reduction
from unwall.shards.home import state_bytes_on
from unwall.tiers.ledger import TierName

_DAY_S = 86_400


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """What a plan will take and how fast it will be, on one rank of many alike unless said otherwise."""

    terms: Terms
    """Bytes by tier and term, at most."""
    peak_bytes: Mapping[TierName, int]
    """What the engine's own account will reach (activations are not in it)."""
    work: StepWork
    """FLOPs, and bytes on each link, in a step."""
    bound: Bound
    """The least a step can take, everything overlapped, and which resource sets it."""
    step_s: float
    """As simulated."""
    busy_s: Mapping[str, float]
    """Work of each queue in a step, were nothing in its way."""
    tokens_per_s: float
    """Of all ranks."""
    mfu: float
    """Model FLOPs (no recomputation) over what the matmul rate would allow."""
    disk_written_bytes_per_day: float
    """Of a node."""
    disk_days: float | None
    """Until a node's drives are worn out. None: nothing is written, or their endurance is unknown."""

    def tier_bytes(self, tier: TierName) -> int:
        """Everything on a tier, activations too."""
        return sum(self.terms[tier].values())

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "terms_bytes": {tier: dict(terms) for tier, terms in self.terms.items()},
            "peak_bytes": dict(self.peak_bytes),
            "work": dict(vars(self.work)),
            "bound_s": self.bound.step_s,
            "bound_by": self.bound.limit,
            "resource_s": dict(self.bound.seconds),
            "step_s": self.step_s,
            "busy_s": dict(self.busy_s),
            "tokens_per_s": self.tokens_per_s,
            "mfu": self.mfu,
            "disk_written_bytes_per_day": self.disk_written_bytes_per_day,
            "disk_days": self.disk_days,
        }


def work_of(job: Job) -> StepWork:
    """What one rank moves and computes in a step, at the least.

    After a step everything is fetched anew. From one forward or backward to the next, what the device has room for may stay.
    """
    load, plan, ranks = job.workload, job.plan, job.ranks
    fetches = 1 + (2 * load.passes - 1) * (1 - kept_share(job))
    h2d = d2h = host = read = written = 0.0
    moved = Traffic()
    for size, home, (_, layout) in zip(job.sizes, job.homes, job.planned, strict=True):
        wide, near = size.grad_bytes + size.widening_bytes, 0.0
        if ranks > 1:
            cut = not size.whole or home.tier == "host"
            gathers = 0 if plan.stage == 0 else fetches if cut and not home.resident else 1
            replicated = gathers > 0 and has_replica(size, home)
            near = gathers - size.trainable if replicated else 0.0  # all but the first after an update
            moved += of_gather(size, home, ranks) * (gathers - near) + of_near_gather(size, plan, ranks) * near
            moved += of_reduction(size, plan, ranks) * load.passes
            if replicated and home.replica == "host":
                h2d += near * size.replica_bytes
                d2h += size.replica_bytes if size.trainable else 0
        if home.tier == "device":
            continue
        brought = (1 if home.resident else fetches - near) * size.shard_bytes
        h2d += brought
        d2h += load.passes * size.landing_bytes
        host += size.own_numel * update_bytes(layout.dtype, plan.lean) if size.trainable else 0
        host += (load.passes - 1) * (size.grad_bytes + 2 * wide) if home.grads == "host" else 0
        read += brought if home.params == "disk" else 0
        if not size.trainable:
            continue
        read += size.shard_bytes if home.params == "disk" else 0
        read += state_bytes_on("disk", size, home)
        written += (size.shard_bytes if home.params == "disk" else 0) + state_bytes_on("disk", size, home)
        if home.grads == "disk":
            read += wide * load.passes if load.passes > 1 else size.grad_bytes
            written += size.grad_bytes + wide * (load.passes - 1)
    kept = load.passes * job.activations.host_bytes
    h2d, d2h = h2d + kept, d2h + kept
    flops = load.passes * flops_of(job.outline.description, load, job.activations)
    return StepWork(
        flops=flops, host_to_device_bytes=h2d, device_to_host_bytes=d2h, host_memory_bytes=host, disk_read_bytes=read,
        disk_write_bytes=written, collective_bytes=moved.total, near_bytes=moved.near, across_bytes=moved.across,
    )  # fmt: skip


def kept_share(job: Job) -> float:
    """How much of what is fetched and dropped may stay on the device from forward to backward."""
    budget = job.state_budget_bytes
    flats = sum(
        size.flat_bytes
        for size, home in zip(job.sizes, job.homes, strict=True)
        if not (size.whole if home.tier == "device" else home.resident)
    )
    if budget is None or not flats:
        return 1.0
    return min(1.0, max(0, budget - job.held_bytes()["device"]) / flats)


def bound_of(job: Job, hardware: Hardware) -> tuple[StepWork, Bound]:
    """The least that a step takes."""
    work = work_of(job)
    return work, lower_bound(work, hardware.ceilings(dtype_name(job.plan.compute_dtype)))


def predict(job: Job, hardware: Hardware) -> Prediction:
    """Everything there is to say. ``BudgetError`` where the device budget does not hold what is in use at once."""
    dtype = job.plan.compute_dtype
    work, bound = bound_of(job, hardware)
    simulated = Simulation(job, pace_of(hardware, dtype)).run()
    terms, load = terms_of(job), job.workload
    described, seconds = job.outline.description, simulated.step_s
    useful = load.passes * described.flops(load.batch, load.seq)
    written = work.disk_write_bytes * min(job.ranks, hardware.devices_per_node)
    return Prediction(
        terms=terms,
        peak_bytes={
            "device": simulated.device_peak_bytes,
            "host": host_peak_bytes(terms, job),
            "disk": disk_peak_bytes(terms, job),
        },
        work=work,
        bound=bound,
        step_s=seconds,
        busy_s=simulated.busy_s,
        tokens_per_s=job.ranks * load.tokens / seconds,
        mfu=useful / seconds / hardware.flops_per_s(dtype_name(dtype)),
        disk_written_bytes_per_day=written / seconds * _DAY_S,
        disk_days=hardware.disk_days(written, seconds) if written else None,
    )


def needed_bytes(job: Job, terms: Terms | None = None) -> dict[TierName, int]:
    """What must be there on each tier for one rank, the activations with it."""
    terms = terms_of(job) if terms is None else terms
    return {tier: sum(found.values()) for tier, found in terms.items()}
