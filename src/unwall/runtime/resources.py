"""What this machine gives a rank: the room that states may take, and the tiers that hold them."""

import shutil
from collections.abc import Sequence

import torch

from unwall.plans import Plan
from unwall.shards.build import Room
from unwall.shards.home import Home, Sizes
from unwall.shards.working import CHUNKS_IN_FLIGHT, chunk_bytes, chunk_elements, ring_slot_bytes
from unwall.tiers.device import DeviceTier
from unwall.tiers.disk import DiskTier
from unwall.tiers.host import HostTier, available_bytes, local_ranks
from unwall.tiers.tiers import Tiers
from unwall.tiers.workers import shared_pool

STATE_SHARE = 0.75
"""How much of the accelerator's free memory states may take when the plan says nothing."""
HOST_SHARE = 0.85
"""The same for the host's available memory."""


def room_on(device: torch.device, plan: Plan, freed_bytes: int = 0) -> Room:
    """What states may take of each tier: what the plan says or, where it says nothing, what the machine has to spare.
    ``freed_bytes``: host memory of this rank that is given back as the states take it."""
    device_bytes, host_bytes, disk_bytes = plan.budget_device_bytes, plan.budget_host_bytes, plan.budget_disk_bytes
    if device_bytes is None and device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        device_bytes = int(free * STATE_SHARE)  # leaves room for activations
    elif device_bytes is not None and device.type == "cuda" and plan.activations == "auto":
        device_bytes = int(device_bytes * STATE_SHARE)  # the same: they are part of the budget
    if host_bytes is None and (device.type == "cuda" or plan.directories):
        host_bytes = int((available_bytes() / local_ranks() + freed_bytes) * HOST_SHARE)
    if disk_bytes is None and plan.directories and all(folder.is_dir() for folder in plan.directories):
        smallest = min(shutil.disk_usage(folder).free for folder in plan.directories)
        disk_bytes = smallest * len(plan.directories) // local_ranks()
    return Room(device_bytes, host_bytes, disk_bytes)


def open_tiers(plan: Plan, device: DeviceTier, rank: int, sizes: Sequence[Sizes], homes: Sequence[Home]) -> Tiers:
    """The tiers of one rank; the disk only where something lives there."""
    host = HostTier(shared_pool(), plan.budget_host_bytes)
    if not any(home.on_disk for home in homes):
        disk = DiskTier(plan.directories, plan.budget_disk_bytes, rank=rank) if plan.activations == "disk" else None
        return Tiers(device, host, disk)
    tiers = Tiers(device, host)
    tiers.open_disk(DiskTier(plan.directories, plan.budget_disk_bytes, rank=rank), *disk_buffers(sizes, homes))
    return tiers


def disk_buffers(sizes: Sequence[Sizes], homes: Sequence[Home]) -> tuple[int, int, int, int]:
    """What goes through the host on its way to and from the disk: the bytes of a ring's slot, the elements and the bytes of an
    update's chunk, and how many chunks there are."""
    elements = chunk_elements(sizes, homes)
    nbytes = max(chunk_bytes(size, home, elements) for size, home in zip(sizes, homes, strict=True))
    return ring_slot_bytes(sizes, homes), elements, nbytes, CHUNKS_IN_FLIGHT
