"""How fast one rank works on a machine: seconds for each kind of work, and what slows what down."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from unwall.planner.formulas import LEAN_UPDATE_TRAFFIC_BYTES, MASTER_UPDATE_TRAFFIC_BYTES, SPLIT_UPDATE_TRAFFIC_BYTES, Ceilings
from unwall.planner.hardware import Hardware
from unwall.planner.outline import Stretch

COMPUTE, FETCH, LAND, GATHER, NEAR, UPDATE, DISK_READ, DISK_WRITE = (
    "compute",
    "host to device",
    "device to host",
    "collectives",
    "collectives in a node",
    "update",
    "disk reads",
    "disk writes",
)
"""The queues of a rank: each works through its own order, beside the others."""


@dataclass(frozen=True)
class Packing:
    """What an element costs that is packed, packed with noise, or unpacked (shards/compress.py), as traffic of the memory that
    it lies in."""

    pack_bytes: int
    noisy_pack_bytes: int
    unpack_bytes: int


HOST_PACKING = Packing(8, 13, 9)
"""Of the native kernels, while an update takes as long. On a core that updates at 36 GB/s they pack 4.9, with noise 2.9, and
unpack 4.3 billion elements per second: ``python -m bench.packing``."""
DEVICE_PACKING = Packing(4, 5, 4)
"""On an accelerator Triton's kernels read and write each element once, which is 3 bytes, at somewhat less than full speed:
``python -m bench.packing --device``. Torch's operations, where there is no Triton, take 140, 440 and 50."""


def dtype_name(dtype: torch.dtype) -> str:
    """As machines are described: ``bfloat16``."""
    return str(dtype).removeprefix("torch.")


def update_bytes(dtype: torch.dtype, lean: bool = False) -> int:
    """Memory traffic of one parameter's AdamW update."""
    if lean and dtype is torch.bfloat16:
        return LEAN_UPDATE_TRAFFIC_BYTES
    return SPLIT_UPDATE_TRAFFIC_BYTES if dtype is torch.bfloat16 else MASTER_UPDATE_TRAFFIC_BYTES


@dataclass(frozen=True, kw_only=True)
class Pace:
    """What one rank reaches while all others do the same."""

    ceilings: Ceilings
    block_flops_per_s: float
    s_per_param: float
    """Forward, beside what grows with the tokens."""
    device_memory_bytes_per_s: float
    cores: int
    is_host: bool

    @property
    def blocking(self) -> bool:
        """Compute runs on the caller's thread, which can do nothing else meanwhile. An accelerator is sent work ahead."""
        return self.is_host

    def compute_s(self, stretch: Stretch, batch: float, seq: float, what: str) -> float:
        """Forward once, backward for twice the price."""
        once = stretch.flops(batch, seq) / self.block_flops_per_s + self.s_per_param * stretch.numel
        return 2 * once if what == "backward" else once

    def packing_s(self, packed: float, unpacked: float, noise: bool = False) -> float:
        """So many elements of each. ``noise``: of stochastic rounding, for gradients."""
        each = HOST_PACKING if self.is_host else DEVICE_PACKING
        nbytes = (each.noisy_pack_bytes if noise else each.pack_bytes) * packed + each.unpack_bytes * unpacked
        return nbytes / self.device_memory_bytes_per_s

    def limits(self) -> dict[str, float]:
        """What the queues share. See :class:`unwall.planner.simulation.clock.Clock`."""
        found = {"cores": 1.0}
        if self.ceilings.host_link_bytes_per_s is not None:
            found["link"] = self.ceilings.host_link_bytes_per_s
        if self.ceilings.disk_bytes_per_s is not None:
            found["disk"] = self.ceilings.disk_bytes_per_s
        return found

    def loads(self) -> dict[str, Mapping[str, float]]:
        """How much of each limit each queue takes at full speed."""
        found: dict[str, dict[str, float]] = {}
        if self.ceilings.host_link_bytes_per_s is not None:
            found[FETCH] = {"link": self.ceilings.host_to_device_bytes_per_s}
            found[LAND] = {"link": self.ceilings.device_to_host_bytes_per_s}
        if self.ceilings.disk_bytes_per_s is not None:
            found[DISK_READ] = {"disk": self.ceilings.disk_read_bytes_per_s}
            found[DISK_WRITE] = {"disk": self.ceilings.disk_write_bytes_per_s}
        if self.is_host:  # compute and updates run on all cores, a copy on one
            for queue, share in ((COMPUTE, 1.0), (UPDATE, 1.0), (FETCH, 1 / self.cores), (LAND, 1 / self.cores)):
                found.setdefault(queue, {})["cores"] = share
        return dict(found)


def pace_of(hardware: Hardware, dtype: torch.dtype) -> Pace:
    """The pace of each device of a machine, all of them at work."""
    name = dtype_name(dtype)
    memory = hardware.host_memory_bytes_per_s if hardware.is_host else hardware.device_memory_bytes_per_s
    return Pace(
        ceilings=hardware.ceilings(name),
        block_flops_per_s=hardware.block_rate(name),
        s_per_param=hardware.block_s_per_param.get(name, 0.0),
        device_memory_bytes_per_s=float("inf") if memory is None else memory,
        cores=max(1, hardware.host_cores),
        is_host=hardware.is_host,
    )
