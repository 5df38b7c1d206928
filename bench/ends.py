"""The published ends by the planner's own search: the largest model of each system, and how a model of 1T scales.

Unlike ``paper.py``, which adds up the papers' formulas, this asks what our engine would hold: its groups, its bytes per
parameter, its working sets, and the share of memory that a plan counts on.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from bench.paper import SEQ, Largest
from unwall.planner.candidates import Allowance, Candidate, allowance_of, build, device_room, shortage
from unwall.planner.choose import ChosenPlan, choose
from unwall.planner.description import from_shape
from unwall.planner.hardware import Hardware, load
from unwall.planner.outline import Outline, skeleton
from unwall.planner.workload import Keeping, Workload

_ON_DISK = {"params": "disk", "grads": "disk", "optimizer": "disk", "disk": "disk"}
SYSTEMS: dict[str, tuple[dict[str, Any], Keeping]] = {
    "plain DP": ({"stage": 0, "params": "device", "optimizer": "device"}, "recompute"),
    "ZeRO-Offload": ({"stage": 2, "params": "device", "optimizer": "host"}, "recompute"),
    "ZeRO-3": ({"stage": 3, "params": "device", "optimizer": "device"}, "recompute"),
    "Infinity, host": ({"stage": 3, "params": "host", "optimizer": "host"}, "host"),
    "Infinity, disk": ({"stage": 3, **_ON_DISK}, "host"),
}
"""What each published system is as a plan of ours, and what happens to activation checkpoints there."""
GPT2_VOCAB = 50257
SCALING_SHAPE, SCALING_BATCH, SCALING_NODES = "128x25600x256", 5, (4, 8, 16, 32)
"""1T parameters; samples per device, our choice; DGX-2 machines of 16 devices."""


@lru_cache(maxsize=64)
def _outline(layers: int, hidden: int, vocab: int) -> Outline:
    return skeleton(from_shape((layers, hidden), vocab=vocab))


def fits(system: str, layers: int, hidden: int, hardware: Hardware, tiles: int = 1, batch: int = 1, vocab: int = 0) -> bool:
    """Whether our engine would hold this shape, with ``batch`` samples of 1024 tokens per device. ``vocab``: with an
    embedding, a head and logits of that size on top."""
    fields, kept = SYSTEMS[system]
    workload = Workload(batch=batch, seq=SEQ, activations=kept)
    place = Candidate(
        name=system, fields=fields | {"tiles": tiles}, workload=workload, budgeted="disk" in fields or kept == "host"
    )
    allowance: Allowance = allowance_of(hardware, directory="disk" if "disk" in fields else None)
    outline = _outline(layers, hidden, vocab)
    if device_room(place, outline, allowance) <= 0:
        return False
    return shortage(build(place, outline, hardware.devices, allowance, torch.float16, hardware)[1], allowance) is None


def largest(system: str, hardware: Hardware, tiles: int = 1, batch: int = 1) -> Largest:
    """The largest shape that fits, of those whose hidden size is 32 to 256 times the number of layers.

    Hidden sizes are tried in steps of an eighth; more layers never take less, so their number is bisected.
    """
    best = Largest(0, 0)
    for hidden in _hidden_sizes():
        low, high = max(1, hidden // 256), max(1, hidden // 32)
        if Largest(high, hidden).params <= best.params or not fits(system, low, hidden, hardware, tiles, batch):
            continue
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if fits(system, middle, hidden, hardware, tiles, batch) else (low, middle - 1)
        best = max(best, Largest(low, hidden), key=lambda found: found.params)
    return best


def _hidden_sizes() -> list[int]:
    found, size = [], 1024.0
    while size <= 64 * 1024:
        found.append(round(size / 256) * 256)
        size *= 1.125
    return found


@dataclass(frozen=True)
class ScalingPoint:
    """The 1T model on so many devices, as the planner chooses."""

    devices: int
    plan: ChosenPlan

    @property
    def tflops(self) -> float:
        """A device's, as the papers count it: recomputation is work."""
        assert self.plan.prediction is not None
        return self.plan.prediction.work.flops / self.plan.prediction.step_s / 1e12


def scaling(machine: str = "dgx-2") -> list[ScalingPoint]:
    """From 64 to 512 devices, with the same batch on each: the best plan for each size."""
    outline = skeleton(from_shape(SCALING_SHAPE))
    found = []
    for nodes in SCALING_NODES:
        hardware = load(machine).with_nodes(nodes)
        batch = SCALING_BATCH * hardware.devices
        plan = choose(outline, hardware, batch=batch, seq=SEQ, directory="disk", kept=("keep", "recompute", "host"))
        found.append(ScalingPoint(hardware.devices, plan))
    return found
