"""The card as the allocator and the driver see it."""

from typing import Any

import torch

from unwall.schedule.limit import Allocated


class CudaProbe:
    """See ``Probe`` in schedule/limit.py. Changes nothing: the user's own peak statistics stay what they are."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def free_bytes(self) -> int:
        return int(torch.cuda.mem_get_info(self._device)[0])

    def allocated(self) -> Allocated:
        # What torch.cuda.memory_stats gives, without the time that it takes to flatten and sort it.
        found: dict[str, Any] = torch.cuda.memory_stats_as_nested_dict(self._device)
        used = found["allocated_bytes"]["all"]
        return Allocated(found["reserved_bytes"]["all"]["current"], used["current"], used["peak"], found["num_ooms"])


def probe_of(device: torch.device) -> CudaProbe | None:
    """What reads the memory of a device, if that can be read."""
    return CudaProbe(device) if device.type == "cuda" else None
