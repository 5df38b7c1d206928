"""Bytes per tier, each term named. The sums are those of ``shards/home.py`` and ``shards/working.py``, as in the engine."""

import torch

from unwall.planner.job import Job, planned_journal_bytes, shadow_bytes
from unwall.shards.home import Home, Sizes, growth_bytes_of, replica_bytes_on
from unwall.shards.states import adamw_specs, bytes_per_element
from unwall.shards.working import (
    RING_SLOTS,
    chunks_bytes,
    ring_slot_bytes,
    transient_bytes,
    working_bytes,
)
from unwall.tiers.ledger import TierName

MOMENT_BYTES = bytes_per_element(adamw_specs(torch.float32))
LEAN_MOMENT_BYTES = bytes_per_element(adamw_specs(torch.bfloat16, lean=True))
TIERS: tuple[TierName, ...] = ("device", "host", "disk")
PARAMETERS, GRADIENTS, MASTER, MOMENTS = "parameters", "gradients", "master", "moments"
WIDENED, SUMS = "gradients, growing to fp32", "sums of gradients in fp32"
REPLICAS, RESIDUALS = "second copies inside the node", "what rounding left of gradients"
GATHERED, GRADIENTS_MOVING = "gathered at once", "gradients on their way"
TRANSIENT = "gradients that are not kept"
CHUNKS, RINGS, LOOKED_AT = "chunks under update", "rings between disk and device", "a state looked at"
SHADOWS = "second places, for updates before the step"
JOURNALS = "journals, for updates before the step"
IGNORED = "parameters left alone, and their gradients"
ACTIVATIONS, CHECKPOINTS = "activations (estimate)", "activation checkpoints (estimate)"

Terms = dict[TierName, dict[str, int]]


def terms_of(job: Job) -> Terms:
    """What one rank holds on each tier, at most, with the activations beside it."""
    found: Terms = {tier: {} for tier in TIERS}
    for size, home, (_, layout) in zip(job.sizes, job.homes, job.planned, strict=True):
        lean = job.plan.lean and layout.dtype is torch.bfloat16
        for tier, name, nbytes in _held(size, home, job.workload.passes, LEAN_MOMENT_BYTES if lean else MOMENT_BYTES):
            found[tier][name] = found[tier].get(name, 0) + nbytes
    _add_working(job, found)
    found["host"][SHADOWS] = sum(shadow_bytes(job.sizes[index]) for index in job.shadowed)
    found["host"][JOURNALS] = sum(planned_journal_bytes(job.sizes[index]) for index in job.journaled)
    on_device, on_host = job.activation_bytes()
    found["device"][ACTIVATIONS] = on_device
    found["device"][IGNORED] = job.outline.ignored_bytes
    if on_host:
        found["host"][CHECKPOINTS] = on_host
    return {tier: {name: nbytes for name, nbytes in terms.items() if nbytes} for tier, terms in found.items()}


def _held(size: Sizes, home: Home, passes: int, moment_bytes: int) -> list[tuple[TierName, str, int]]:
    """Where each state of one group lies."""
    moments = moment_bytes * size.own_numel if size.trainable else 0
    params = size.shard_bytes if home.tier == "host" or not size.whole else size.flat_bytes
    rows: list[tuple[TierName, str, int]] = [
        (home.params, PARAMETERS, params),
        (home.master, MASTER, size.state_bytes - moments),
        (home.states, MOMENTS, moments),
        (home.grads, GRADIENTS, size.grad_bytes),
    ]
    if home.grads != "host":
        rows.append((home.grads, WIDENED, growth_bytes_of(size, home)))
    elif passes > 1 and size.trainable:  # beside the landed gradient
        rows.append(("host", SUMS, size.grad_bytes + size.widening_bytes))
    rows += [("device", RESIDUALS, size.residual_bytes), ("host", RESIDUALS, size.averaged_residual_bytes)]
    rows.append((home.replica, REPLICAS, replica_bytes_on(home.replica, size, home)))
    if home.resident:
        rows.append(("device", PARAMETERS, size.flat_bytes))
    return rows


def _add_working(job: Job, found: Terms) -> None:
    """What comes and goes: as ``working_bytes`` and ``host_working_bytes`` count it."""
    come_and_go = [
        size.flat_bytes
        for size, home in zip(job.sizes, job.homes, strict=True)
        if not (size.whole if home.tier == "device" else home.resident)
    ]
    gathered = sum(sorted(come_and_go)[-2:])
    found["device"][GATHERED] = gathered
    found["device"][GRADIENTS_MOVING] = working_bytes(job.sizes, job.homes) - gathered
    found["host"][TRANSIENT] = transient_bytes(job.sizes, job.homes)
    on_disk = [(size, home) for size, home in zip(job.sizes, job.homes, strict=True) if home.on_disk]
    if not on_disk:
        return
    chunks = chunks_bytes(job.sizes, job.homes)
    ways = any(home.params == "disk" for _, home in on_disk) + any(home.grads == "disk" for _, home in on_disk)
    rings = ways * RING_SLOTS * ring_slot_bytes(job.sizes, job.homes)
    found["host"][CHUNKS], found["host"][RINGS] = chunks, rings
    found["host"][LOOKED_AT] = max(MOMENT_BYTES * size.own_numel for size, _ in on_disk)


def host_peak_bytes(terms: Terms, job: Job) -> int:
    """What the engine's account of the host reaches while training. No state is looked at whole, except that a gradient on disk
    is added to in memory."""
    total = sum(nbytes for name, nbytes in terms["host"].items() if name not in (LOOKED_AT, CHECKPOINTS))
    on_disk = [(size, home) for size, home in zip(job.sizes, job.homes, strict=True) if home.on_disk]
    if not on_disk:
        return total
    if job.workload.passes > 1:
        total += max((size.grad_bytes + size.widening_bytes for size, home in on_disk if home.grads == "disk"), default=0)
    return total


def disk_peak_bytes(terms: Terms, job: Job) -> int:
    """The same of the disk: with several passes the gradient grows into a sum in fp32."""
    disk = terms["disk"]
    if job.workload.passes == 1:
        return sum(nbytes for name, nbytes in disk.items() if name != WIDENED)
    return sum(disk.values())
