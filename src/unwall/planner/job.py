"""What is to be predicted: a model, a plan and a workload, as the engine would set them up on one rank."""

from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from unwall.planner.outline import Outline, Stretch
from unwall.plans import Plan, PlanError
from unwall.schedule.executor import REDUCES_IN_FLIGHT
from unwall.shards.arrange import Planned, fitting
from unwall.shards.build import Room, plan_groups, sizes_of
from unwall.shards.grouping import Unit
from unwall.shards.layout import Layout
from unwall.shards.placement import Home, Sizes, device_bytes_of, disk_bytes_of, host_bytes_of, place
from unwall.shards.tiles import forced

Keeping = Literal["keep", "recompute", "host"]
"""What happens to activations: all kept, only each block's input kept, or that one sent to the host."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What one rank computes between two steps."""

    batch: int = 1
    """Samples per forward and backward."""
    seq: int = 1024
    """Tokens per sample."""
    passes: int = 1
    """Forwards and backwards before a step: their gradients add up."""
    activations: Keeping = "recompute"
    clip: bool = True
    """Gradients are clipped: their norm is needed before the first update. Without clipping, states on the host are updated
    while backward runs, as far as spare host memory goes (``optim/early.py``)."""
    update_in_backward: bool = False
    """AdamW's promise of that name: all states on host and disk are updated while backward runs, in place."""

    def __post_init__(self) -> None:
        for name in ("batch", "seq", "passes"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be a whole number above 0, got {value!r}")
        if self.update_in_backward and (self.clip or self.passes > 1):
            raise ValueError("update_in_backward goes with one pass per step, and without clipping")
        if self.activations not in ("keep", "recompute", "host"):
            raise ValueError(f"activations is keep, recompute or host, got {self.activations!r}")

    @property
    def tokens(self) -> int:
        """Of one step, on one rank."""
        return self.batch * self.seq * self.passes

    @property
    def recompute(self) -> bool:
        return self.activations != "keep"


@dataclass(frozen=True)
class Job:
    """One rank's part: the groups that the engine makes of the model, where each one lives, and what runs over them."""

    outline: Outline
    plan: Plan
    ranks: int
    workload: Workload
    planned: tuple[tuple[Unit, Layout], ...]
    sizes: tuple[Sizes, ...]
    homes: tuple[Home, ...]
    shadowed: tuple[int, ...] = ()
    """Groups with a second place for their states on the host, so that they can be updated before the step."""

    @property
    def early(self) -> frozenset[int]:
        """Groups that are updated while backward runs."""
        if self.workload.update_in_backward:
            return frozenset(index for index, home in enumerate(self.homes) if home.tier == "host")
        return frozenset(self.shadowed)

    @cached_property
    def stretches(self) -> list[Stretch]:
        return self.outline.stretches([unit for unit, _ in self.planned])

    def held_bytes(self) -> dict[str, int]:
        """By tier, between passes; as the engine counts."""
        of = {"device": device_bytes_of, "host": host_bytes_of, "disk": disk_bytes_of}
        pairs = list(zip(self.sizes, self.homes, strict=True))
        return {tier: sum(count(*pair) for pair in pairs) for tier, count in of.items()}

    def activation_bytes(self) -> tuple[int, int]:
        """On the device and on the host."""
        return activation_bytes(self.outline, self.workload)


def activation_bytes(outline: Outline, load: Workload) -> tuple[int, int]:
    """On the device and on the host, of one rank: what stays for backward, and what is recomputed at a time."""
    described = outline.description
    if load.activations == "keep":
        return int(described.activation_bytes(load.batch, load.seq)), 0
    kept = int(described.checkpoint_bytes(load.batch, load.seq))
    working = int(described.activation_working_bytes(load.batch, load.seq))
    return (kept + working, 0) if load.activations == "recompute" else (working, kept)


def make_job(
    outline: Outline,
    plan: Plan,
    ranks: int,
    workload: Workload,
    device_room_bytes: int | None,
    host_room_bytes: int | None,
) -> Job:
    """Groups and homes by the engine's own decisions; whether they fit is for the caller to see.

    The rooms are what this rank may use, where the plan itself says nothing.
    """
    planned = _planned(outline, plan, ranks, Room(device_room_bytes, host_room_bytes))
    sizes = sizes_of(planned, plan, ranks)
    homes = place(sizes, plan, device_room_bytes, host_room_bytes)
    shadowed = _shadowed(sizes, homes, workload, host_room_bytes)
    return Job(outline, plan, ranks, workload, tuple(planned), tuple(sizes), tuple(homes), shadowed)


def _planned(outline: Outline, plan: Plan, ranks: int, room: Room) -> Planned:
    """Groups, with tiles where ``shard`` would cut parameters."""
    largest, room_bytes = outline.largest_tileable_numel * plan.compute_dtype.itemsize, room.device_bytes
    if plan.tiles is not None or (room_bytes is not None and 4 * largest > room_bytes):
        with suppress(PlanError):  # what is missing is for the caller to see
            return fitting(outline.module, plan, ranks, room, forced(outline.module, plan))[0]
    return plan_groups(outline.module, plan, ranks)


def shadow_bytes(size: Sizes) -> int:
    """What a second place for a group's states takes."""
    return size.shard_bytes + size.state_bytes


def _shadowed(sizes: list[Sizes], homes: list[Home], load: Workload, room_bytes: int | None) -> tuple[int, ...]:
    """The first groups of the model whose second place the host has room for, as ``optim/shadows.py`` chooses them."""
    if load.clip or load.passes > 1 or load.update_in_backward:
        return ()
    held = sum(host_bytes_of(*pair) for pair in zip(sizes, homes, strict=True))
    left = float("inf") if room_bytes is None else room_bytes - held
    chosen = []
    for index, (size, home) in enumerate(zip(sizes, homes, strict=True)):
        if home.tier != "host" or home.on_disk or not size.trainable:
            continue
        left -= shadow_bytes(size)
        if left < 0:
            break
        # Those whose gradients are still on their way when backward ends are updated at the step.
        if index >= REDUCES_IN_FLIGHT or homes[0].tier == "device":
            chosen.append(index)
    return tuple(chosen)
