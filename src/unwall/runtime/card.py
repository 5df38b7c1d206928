"""The card as the allocator and the driver see it, or as the plan says that it is."""

from collections.abc import Callable
from typing import Any

import torch

from unwall.schedule.limit import Allocated, Probe


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


class SmallerCard:
    """A card of which the plan gives us ``card_bytes``."""

    def __init__(self, probe: Probe, card_bytes: int) -> None:
        self._probe = probe
        self._card_bytes = card_bytes

    def free_bytes(self) -> int:
        left = self._card_bytes - self._probe.allocated().reserved_bytes
        return max(0, min(left, self._probe.free_bytes()))

    def allocated(self) -> Allocated:
        found = self._probe.allocated()
        return found._replace(reserved_bytes=min(found.reserved_bytes, self._card_bytes))


class CountedCard:
    """A card that is only an account, where there is no accelerator: ``ours`` and what activations were counted to ``hold``."""

    def __init__(self, card_bytes: int, ours: Callable[[], int], held: Callable[[], int]) -> None:
        self._card_bytes = card_bytes
        self._ours, self._held = ours, held
        self._peak = 0

    def free_bytes(self) -> int:
        return 0

    def allocated(self) -> Allocated:
        now = self._ours() + self._held()
        self._peak = max(self._peak, now)
        return Allocated(self._card_bytes, now, self._peak, 0)


_ENDLESS = 1 << 62


def card_of(plan_bytes: int | None, device: torch.device, ours: Callable[[], int], held: Callable[[], int]) -> Probe:
    """What states and activations share. Without an accelerator and without ``device_bytes`` it has no end."""
    probe = probe_of(device)
    if probe is None:
        return CountedCard(_ENDLESS if plan_bytes is None else plan_bytes, ours, held)
    return probe if plan_bytes is None else SmallerCard(probe, plan_bytes)
