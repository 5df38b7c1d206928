"""Which tier each state of each group lives on. Pure decisions over byte counts.

[Note: ladder]
A group can live at four heights. All its states on the device; all on the host; parameters and gradient on the host with the
optimizer state on disk; everything on disk. A byte of parameters on disk costs three transfers per step (read for forward and
for backward, written after the update), a byte of gradient or optimizer state two. So host memory goes to the parameters and
gradients of all groups first, then to optimizer state, and the device takes whole groups.

[Note: masters]
What is then left of the host is too little for the master and optimizer state of any group, but it may hold the masters of some
alone, while the rest of their state is on disk. That is a finer step: 2 of 10 bytes per element, with AdamW and bf16. Masters
belong to the groups, so they are as large whatever the optimizer turns out to be; and since that may keep more than AdamW, on
disk, there stays room for chunks twice as large.

[Note: one pass]
A gradient that waits on the device may have to grow: several passes add up in fp32. Room for that is 2 of 16 bytes per element,
with bf16. Where more of the model would lie on a drive for it, or would not fit at all, a plan of one pass is taken at its
word: nothing is set aside, and a second backward before the step is refused before it begins. With ``host_bytes`` the host
refuses it there in any case, because states fill it. Without, sums may take what is left of the machine, so room is set aside.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from unwall.plans import Plan
from unwall.shards.tally import Tally
from unwall.tiers.ledger import TierName
from unwall.tiers.sizes import ALIGNMENT, align_up

CHUNK_ELEMENTS = 1 << 20
"""What an update of state on disk reads, updates and writes at a time, at most."""
CHUNKS_IN_FLIGHT = 6
RING_SLOTS = 4
RING_SLOT_BYTES = 8 << 20
TRANSIENT_GRADIENTS = 3
"""Of those that are not kept, on the host at once: one lands, one waits, one is used."""


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
        return held + sizes.state_bytes + sizes.grad_bytes + growth_bytes_of(sizes, home) + kept
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
    return held + state_bytes_on(tier, sizes, home) + (sizes.grad_bytes if home.grads == tier else 0)


def state_bytes_on(tier: TierName, sizes: Sizes, home: Home) -> int:
    """What a tier holds of a group's master and optimizer state."""
    master = sizes.master_bytes if home.master == tier else 0
    return master + (sizes.state_bytes - sizes.master_bytes if home.states == tier else 0)


def working_bytes(sizes: Sequence[Sizes], homes: Sequence[Home]) -> int:
    """What comes and goes on the device: two groups gathered (where one ends and the next begins), two gradients, what they
    are reduced to, and one gradient in both widths while it moves to fp32. Packed parameters: of three groups, one that is
    needed and two that are fetched ahead. Or, where that is more, what calls inside calls read
    at once, and one gradient. It is enough for every order of uses: see [Note: room] in schedule/room.py."""
    moving = [
        size for size, home in zip(sizes, homes, strict=True) if not (size.whole if home.tier == "device" else home.resident)
    ]
    flats = sorted(size.flat_bytes for size in moving)
    grads = sorted(size.grad_flat_bytes for size in sizes)
    parts = sorted(size.grad_part_bytes for size in sizes)
    widening = max((size.widening_bytes for size in sizes), default=0)
    usual = sum(flats[-2:]) + sum(grads[-2:]) + sum(parts[-2:])
    nested = max((size.at_once_bytes for size in moving), default=0) + sum(grads[-1:]) + sum(parts[-1:])
    transits = sorted(transit_bytes_of(size, home) for size, home in zip(sizes, homes, strict=True))
    return max(usual, nested) + widening + sum(transits[-3:])


def transit_bytes_of(sizes: Sizes, home: Home) -> int:
    """What a gather of the group takes on its way. See [Note: packed gathers] in shards/packed_gather.py."""
    return 0 if home.params == "device" and sizes.whole else sizes.transit_bytes


def least_device_bytes(sizes: Sequence[Sizes], homes: Sequence[Home]) -> int:
    """What is held, what comes and goes, and two more groups that are fetched ahead."""
    held = sum(device_bytes_of(size, home) for size, home in zip(sizes, homes, strict=True))
    return held + working_bytes(sizes, homes) + 2 * max(size.flat_bytes for size in sizes)


def chunk_elements(sizes: Sequence[Sizes], homes: Sequence[Home]) -> int:
    """How much of a group's state an update of state on disk works on at a time: a sixteenth of a small model's largest group,
    so that reads, updates and writes overlap there, too."""
    largest = max((size.own_numel for size, home in zip(sizes, homes, strict=True) if home.on_disk), default=0)
    step = ALIGNMENT  # whole sectors in every representation, that of one byte included
    return min(CHUNK_ELEMENTS, align_up(-(-largest // 16), step)) if largest else 0


def ring_slot_bytes(sizes: Sequence[Sizes], homes: Sequence[Home]) -> int:
    """A slot of the rings through which device and disk exchange bytes."""
    largest = max((max(s.shard_bytes, s.grad_bytes) for s, h in zip(sizes, homes, strict=True) if h.on_disk), default=0)
    return min(RING_SLOT_BYTES, align_up(-(-largest // RING_SLOTS))) if largest else ALIGNMENT


def host_working_bytes(sizes: Sequence[Sizes], homes: Sequence[Home]) -> int:
    """What comes and goes on the host: gradients that are not kept and, because of the disk, chunks under update, the rings
    between disk and device, and one group's largest state while it is looked at whole."""
    passing = transient_bytes(sizes, homes)
    on_disk = [(size, home) for size, home in zip(sizes, homes, strict=True) if home.on_disk]
    if not on_disk:
        return passing
    elements = chunk_elements(sizes, homes)
    total = passing + CHUNKS_IN_FLIGHT * max(chunk_bytes(size, home, elements) for size, home in on_disk)
    crossings = {"params" for _, home in on_disk if home.params == "disk"} | {
        "grads" for _, home in on_disk if home.grads == "disk"
    }
    total += len(crossings) * RING_SLOTS * ring_slot_bytes(sizes, homes)
    return total + max(8 * size.own_numel for size, _ in on_disk)


def transient_bytes(sizes: Sequence[Sizes], homes: Sequence[Home]) -> int:
    """Host memory that gradients go through which are not kept."""
    on_host = (size.transient_bytes for size, home in zip(sizes, homes, strict=True) if home.tier == "host")
    return TRANSIENT_GRADIENTS * max(on_host, default=0)


def chunk_bytes(size: Sizes, home: Home, elements: int) -> int:
    """Host memory of one chunk under update: of each state that lies on disk, ``elements``."""
    share = elements / max(1, size.own_numel)
    grads = size.grad_bytes + size.widening_bytes if home.grads == "disk" else 0
    held = (size.shard_bytes if home.params == "disk" else 0) + state_bytes_on("disk", size, home) + grads
    return align_up(int(held * share)) + 4 * ALIGNMENT if held else 0


def place(
    sizes: Sequence[Sizes], plan: Plan, device_budget_bytes: int | None, host_budget_bytes: int | None = None
) -> list[Home]:
    """A home for every group, the fastest that the budgets hold. See [Note: ladder].

    The first groups of the model go to the device: they are needed first, while the host still updates the rest. What does
    not fit anywhere gets its slowest home all the same; ``check_fit`` in build.py says what is missing.
    """
    frozen = _ladder(False, plan)
    trained = _ladder(True, plan)
    ladders = [trained if size.trainable else frozen for size in sizes]
    homes = _placed(sizes, ladders, plan, device_budget_bytes, host_budget_bytes)
    short = _lack(sizes, homes, device_budget_bytes, host_budget_bytes)
    if short == (0, 0) or (short[0] == 0 and plan.budget_host_bytes is None) or DEVICE not in trained:
        return homes
    tight = [ONE_PASS if home == DEVICE else home for home in trained]
    ladders = [tight if size.trainable and not size.adds_up else each for size, each in zip(sizes, ladders, strict=True)]
    tighter = _placed(sizes, ladders, plan, device_budget_bytes, host_budget_bytes)
    return tighter if _lack(sizes, tighter, device_budget_bytes, host_budget_bytes) < short else homes


def _lack(sizes: Sequence[Sizes], homes: Sequence[Home], device: int | None, host: int | None) -> tuple[int, int]:
    """Bytes beyond the budgets of device and host, and what is on disk."""
    tally = Tally(sizes, homes)
    beyond = 0
    if device is not None:
        beyond += max(0, tally.held_bytes(device_bytes_of) + working_bytes(*tally.some()) - device)
    if host is not None:
        beyond += max(0, tally.held_bytes(host_bytes_of) + host_working_bytes(*tally.some()) - host)
    return beyond, tally.held_bytes(disk_bytes_of)


def _placed(
    sizes: Sequence[Sizes],
    ladders: Sequence[Sequence[Home]],
    plan: Plan,
    device_budget_bytes: int | None,
    host_budget_bytes: int | None,
) -> list[Home]:
    homes = [ladder[-1] for ladder in ladders]
    homes = _climb(sizes, ladders, homes, "device", lambda trial: _fits_device(trial, device_budget_bytes))
    homes = _near_replicas(sizes, homes, device_budget_bytes)  # first: what lies on the device takes nothing of the host
    for goal in (SPILLED, HOST):  # first everyone's parameters and gradients, then optimizer state
        homes = _climb_together(sizes, ladders, homes, goal, host_budget_bytes)
    homes = _keep_masters(sizes, ladders, homes, host_budget_bytes)
    return [replace(home, grads="host") if plan.transient and home.grads == "disk" else home for home in homes]


def _near_replicas(sizes: Sequence[Sizes], homes: list[Home], budget_bytes: int | None) -> list[Home]:
    """The second copies of groups that live on the device lie there, too, as far as there is room."""
    tally = Tally(sizes, homes)
    for index, (size, home) in enumerate(zip(sizes, homes, strict=True)):
        if home.tier == "device" and replica_bytes_on("host", size, home):
            tally.move(index, replace(home, replica="device"))
            if not _fits_device(tally, budget_bytes):
                tally.move(index, home)
    return tally.homes


def _keep_masters(
    sizes: Sequence[Sizes], ladders: Sequence[Sequence[Home]], homes: list[Home], budget_bytes: int | None
) -> list[Home]:
    """See [Note: masters]. Where the plan names the tier of optimizer state the master stays with it."""
    pairs = list(zip(sizes, homes, strict=True))
    able = [at for at, (size, home) in enumerate(pairs) if home == SPILLED and HOST in ladders[at] and size.trainable]
    if budget_bytes is None or not able:
        return homes
    elements = chunk_elements(sizes, homes)
    spare = CHUNKS_IN_FLIGHT * max(chunk_bytes(size, home, elements) for size, home in pairs)
    left = budget_bytes - sum(host_bytes_of(*pair) for pair in pairs) - host_working_bytes(sizes, homes) - spare
    kept = list(homes)
    for at in able:
        if 0 < sizes[at].master_bytes <= left:
            kept[at] = MASTER_KEPT
            left -= sizes[at].master_bytes
    return kept


def _climb_together(
    sizes: Sequence[Sizes], ladders: Sequence[Sequence[Home]], homes: list[Home], goal: Home, budget_bytes: int | None
) -> list[Home]:
    """Raises the groups that are not on the device towards ``goal``: all at once if that fits, otherwise one after the other.

    All at once comes first, because the disk's buffers go when its last group does: looking at one group at a time, a host
    that can hold everything would seem too small."""
    below = {key: _at_most(ladder, goal) for key, ladder in {id(ladder): ladder for ladder in ladders}.items()}
    limits = [ladder if home.tier == "device" else below[id(ladder)] for ladder, home in zip(ladders, homes, strict=True)]
    everyone = [home if home.tier == "device" else limit[0] for limit, home in zip(limits, homes, strict=True)]
    if _fits_host(Tally(sizes, everyone), budget_bytes):
        return everyone
    return _climb(sizes, limits, homes, "host", lambda trial: _fits_host(trial, budget_bytes))


def _climb(
    sizes: Sequence[Sizes],
    ladders: Sequence[Sequence[Home]],
    homes: list[Home],
    tier: TierName,
    fits: Callable[[Tally[Sizes, Home]], bool],
) -> list[Home]:
    """Raises one group after the other to the top of its ladder, as long as that fits."""
    tally = Tally(sizes, homes)
    refused: set[tuple[int, Home, Home]] = set()
    for index in range(len(sizes)):
        top, home = ladders[index][0], homes[index]
        if top == home or (tier == "device") != (top.tier == "device") or home.tier == "device":
            continue
        if (tally.kinds[index], home, top) in refused:
            continue  # another one like it did not fit, and nothing has moved since
        tally.move(index, top)
        if fits(tally):
            refused.clear()
            continue
        tally.move(index, home)
        if tier == "device":
            break  # the first groups, without gaps
        refused.add((tally.kinds[index], home, top))
    return tally.homes


def _fits_device(tally: Tally[Sizes, Home], budget: int | None) -> bool:
    return budget is None or tally.held_bytes(device_bytes_of) + working_bytes(*tally.some()) <= budget


def _fits_host(tally: Tally[Sizes, Home], budget: int | None) -> bool:
    return budget is None or tally.held_bytes(host_bytes_of) + host_working_bytes(*tally.some()) <= budget


def _at_most(ladder: Sequence[Home], goal: Home) -> list[Home]:
    """The rungs of a ladder that are not above ``goal``."""
    rank = {home: height for height, home in enumerate(LADDER)} | {ONE_PASS: 0}
    kept = [home for home in ladder if rank.get(home, len(LADDER)) >= rank[goal]]
    return kept or list(ladder[-1:])


def _ladder(trainable: bool, plan: Plan) -> list[Home]:
    """The homes that the plan allows a group, the fastest first. One entry: the plan leaves no choice."""
    params, states, grads = plan.params, plan.optimizer, "auto" if plan.transient else plan.grads
    if not trainable:
        states, grads = params, "auto"
    elif states == "auto" and params != "auto":
        states = params  # they live together unless told otherwise
    if states == "auto":
        allowed = [DEVICE, HOST, *([SPILLED, DISK] if plan.directories else [])]
        return [home for home in allowed if grads in ("auto", home.grads)] or [DISK]
    if states == "device":
        return [DEVICE]  # the update needs the parameters beside its state
    landing: TierName = "disk" if grads == "disk" else "host"
    shard: TierName = "disk" if params == "disk" else "host"
    if params == "auto" and states == "disk":
        return [Home("host", "disk", landing), Home("disk", "disk", landing)]
    return [Home(shard, states, landing, resident=params == "device")]
