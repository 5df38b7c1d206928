"""What a group takes, where its states live, and how many bytes of each tier that is. Pure.

[Note: ladder]
A group can live at four heights. All its states on the device; all on the host; parameters and gradient on the host with the
optimizer state on disk; everything on disk. A byte of parameters on disk costs three transfers per step (read for forward and
for backward, written after the update), a byte of gradient or optimizer state two. So host memory goes to the parameters and
gradients of all groups first, then to optimizer state, and the device takes whole groups.
"""

from dataclasses import dataclass, replace

from unwall.tiers.ledger import TierName


@dataclass(frozen=True)
class Sizes:
    """What a group takes on one rank, in bytes."""

    shard_bytes: int
    """This rank's part of the parameters."""
    flat_bytes: int
    """The whole parameters, gathered."""
    state_bytes: int
    """Master and optimizer state."""
    grad_bytes: int
    """The gradient that the update reads."""
    grad_flat_bytes: int
    """The whole gradient, before it is reduced (0 where nothing is trained)."""
    grad_part_bytes: int
    """What the whole gradient is reduced to on this rank (0 where a rank is alone)."""
    widening_bytes: int
    """What the gradient grows by when several passes add up in fp32."""
    whole: bool
    """The parameters are not cut: held on the device they are held gathered."""
    trainable: bool
    own_numel: int
    """Elements whose states this rank keeps."""
    sum_bytes: int = 0
    """What the sum of several passes takes beside the gradient that landed last, on the host (0 where there is one pass)."""
    at_once_bytes: int = 0
    """The whole parameters of all groups that are read at once where a module of this one runs."""
    transit_bytes: int = 0
    """What the whole parameters take as they travel, where that is not their dtype."""
    exchange_bytes: int = 0
    """The same for the whole gradient. It is part of ``grad_part_bytes``, once as it is sent and once as it is received."""
    residual_bytes: int = 0
    """What is kept on the device of the gradient that rounding took from what was sent."""
    averaged_residual_bytes: int = 0
    """What is kept on the host of this rank's gradient that rounding took from what was sent to other replicas."""
    replica_bytes: int = 0
    """This rank's part of a second copy inside the node ([Note: replica] in shards/replica.py)."""
    master_bytes: int = 0
    """What the master takes beside the parameters: a part of ``state_bytes``."""
    transient_bytes: int = 0
    """What the gradient takes while it waits for its update, where it is not kept (then ``grad_bytes`` is 0)."""
    adds_up: bool = True
    """Its gradient may be added to in a plan's only pass, or the plan says that there are several. See [Note: one pass]."""

    average_bytes: int = 0
    """Averages of the parameters, which lie with the optimizer state and take no part in updates."""

    @property
    def landing_bytes(self) -> int:
        """What goes to where the update runs, of one pass."""
        return self.grad_bytes + self.transient_bytes


@dataclass(frozen=True)
class Home:
    """Where the states of a group live."""

    params: TierName
    states: TierName
    """Of the optimizer state and, unless ``apart`` says otherwise, the master."""
    grads: TierName
    """Where the gradient waits for the update."""
    resident: bool = False
    """Updated on the host, but the gathered parameters are never dropped from the device."""
    replica: TierName = "host"
    """Where a second copy inside the node lies, if there is one."""
    apart: TierName | None = None
    """Of the master, where it is not with the optimizer state: see [Note: masters]."""
    one_pass: bool = False
    """On the device: there is no room for the sum of several passes. See [Note: one pass]."""

    @property
    def master(self) -> TierName:
        return self.apart or self.states

    @property
    def tier(self) -> TierName:
        """Where the update runs: on the device, or on the host, which reads and writes what lies on disk."""
        return "device" if self.states == "device" else "host"

    @property
    def on_disk(self) -> bool:
        return "disk" in (self.params, self.states, self.grads, self.apart)


DEVICE = Home("device", "device", "device")
HOST = Home("host", "host", "host")
SPILLED = Home("host", "disk", "host")
DISK = Home("disk", "disk", "disk")
LADDER = (DEVICE, HOST, SPILLED, DISK)
"""See [Note: ladder]."""
MASTER_KEPT = replace(SPILLED, apart="host")
"""See [Note: masters]."""
ONE_PASS = replace(DEVICE, one_pass=True)
"""See [Note: one pass]."""


def device_bytes_of(sizes: Sizes, home: Home) -> int:
    """What a group holds on the device at most between passes: its gradient may have grown by adding up."""
    kept = sizes.residual_bytes + replica_bytes_on("device", sizes, home)
    if home.tier == "device":
        held = sizes.flat_bytes if sizes.whole else sizes.shard_bytes
        growth = growth_bytes_of(sizes, home)
        return held + sizes.state_bytes + sizes.average_bytes + sizes.grad_bytes + growth + kept
    return kept + (sizes.flat_bytes if home.resident else 0)


def growth_bytes_of(sizes: Sizes, home: Home) -> int:
    """What is set aside where the gradient waits for its update, beside it, for its sum in fp32."""
    return 0 if home.one_pass or home.grads == "host" else sizes.widening_bytes


def host_bytes_of(sizes: Sizes, home: Home) -> int:
    held = _on("host", sizes, home) + replica_bytes_on("host", sizes, home) + sizes.averaged_residual_bytes
    return held + (sizes.sum_bytes if home.grads == "host" else 0)


def replica_bytes_on(tier: TierName, sizes: Sizes, home: Home) -> int:
    """What a second copy inside the node takes on a tier. There is none of what is never dropped from the device."""
    stays = home.resident or (home.params == "device" and sizes.whole)
    return 0 if stays or home.replica != tier else sizes.replica_bytes


def disk_bytes_of(sizes: Sizes, home: Home) -> int:
    return _on("disk", sizes, home) + (growth_bytes_of(sizes, home) if home.grads == "disk" else 0)


def _on(tier: TierName, sizes: Sizes, home: Home) -> int:
    held = sizes.shard_bytes if home.params == tier else 0
    held += sizes.average_bytes if home.states == tier else 0
    return held + state_bytes_on(tier, sizes, home) + (sizes.grad_bytes if home.grads == tier else 0)


def state_bytes_on(tier: TierName, sizes: Sizes, home: Home) -> int:
    """What a tier holds of a group's master and optimizer state."""
    master = sizes.master_bytes if home.master == tier else 0
    return master + (sizes.state_bytes - sizes.master_bytes if home.states == tier else 0)
