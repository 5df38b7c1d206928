"""Which tier each group lives on. Pure decisions over byte counts."""

from collections.abc import Sequence
from dataclasses import dataclass

from unwall.plan import Plan
from unwall.tiers.ledger import TierName


@dataclass(frozen=True)
class Sizes:
    """What a group takes on one rank, in bytes."""

    shard_bytes: int
    """This rank's part of the parameters."""
    flat_bytes: int
    """The whole parameters, gathered."""
    state_bytes: int
    """Master and optimizer state, and the gradient it is updated with."""
    grad_flat_bytes: int
    """The whole gradient, before it is reduced (0 where nothing is trained)."""
    grad_part_bytes: int
    """What the whole gradient is reduced to on this rank (0 where a rank is alone)."""
    widening_bytes: int
    """What the gradient grows by when several passes add up in fp32."""
    whole: bool
    """The parameters are not cut: held on the device they are held gathered."""
    trainable: bool


@dataclass(frozen=True)
class Home:
    """Where a group lives."""

    tier: TierName
    """Of the parameter shard, its master, gradient and optimizer state: the update runs there."""
    resident: bool = False
    """Home on the host, but the gathered parameters are never dropped from the device."""


def device_bytes_of(sizes: Sizes, home: Home) -> int:
    """What a group holds on the device at most between passes: its gradient may have grown by adding up."""
    if home.tier == "device":
        return (sizes.flat_bytes if sizes.whole else sizes.shard_bytes) + sizes.state_bytes + sizes.widening_bytes
    return sizes.flat_bytes if home.resident else 0


def host_bytes_of(sizes: Sizes, home: Home) -> int:
    return sizes.shard_bytes + sizes.state_bytes if home.tier == "host" else 0


def working_bytes(sizes: Sequence[Sizes], homes: Sequence[Home]) -> int:
    """What comes and goes on the device: two groups gathered (where one ends and the next begins), two gradients, what they
    are reduced to, and one gradient in both widths while it moves to fp32."""
    flats = sorted(
        size.flat_bytes
        for size, home in zip(sizes, homes, strict=True)
        if not (size.whole if home.tier == "device" else home.resident)
    )
    grads = sorted(size.grad_flat_bytes for size in sizes)
    parts = sorted(size.grad_part_bytes for size in sizes)
    return sum(flats[-2:]) + sum(grads[-2:]) + sum(parts[-2:]) + max((size.widening_bytes for size in sizes), default=0)


def place(sizes: Sequence[Sizes], plan: Plan, device_budget_bytes: int | None) -> list[Home]:
    """A home for every group.

    The update needs parameters, master and state in one place, so parameters live with their optimizer state; a plan that
    asks for parameters on a slower tier than their optimizer state gets them there with it. ``"auto"`` puts the first groups
    of the model on the device, as many as the budget holds: they are needed first, while the host still updates the rest.
    """
    homes = [_asked(size, plan) for size in sizes]
    if all(home is not None for home in homes):
        return [home for home in homes if home is not None]
    spilled = [home or Home("host") for home in homes]
    if device_budget_bytes is None:
        return [home or Home("device") for home in homes]
    best = spilled
    for count in range(len(sizes) + 1):  # the first `count` undecided groups on the device
        trial, left = [], count
        for home in homes:
            trial.append(home if home is not None else Home("device") if left > 0 else Home("host"))
            left -= home is None
        held = sum(device_bytes_of(size, home) for size, home in zip(sizes, trial, strict=True))
        if held + working_bytes(sizes, trial) > device_budget_bytes:
            break
        best = trial
    return best


def _asked(size: Sizes, plan: Plan) -> Home | None:
    """What the plan says itself; None: to be decided."""
    params, states = plan.params, plan.optimizer
    if not size.trainable:
        return None if params == "auto" else Home("host") if params == "host" else Home("device")
    if states == "auto":
        states = params
    if states == "auto":
        return None
    if states == "device":
        return Home("device")
    return Home("host", params == "device")
