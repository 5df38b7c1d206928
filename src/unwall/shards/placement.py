"""Which tier each state of each group lives on. Pure decisions over byte counts.

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
from dataclasses import replace

from unwall.plans import Plan
from unwall.shards.home import (
    DEVICE,
    DISK,
    HOST,
    LADDER,
    MASTER_KEPT,
    ONE_PASS,
    SPILLED,
    Home,
    Sizes,
    device_bytes_of,
    disk_bytes_of,
    host_bytes_of,
    replica_bytes_on,
)
from unwall.shards.tally import Tally
from unwall.shards.working import chunks_bytes, host_working_bytes, working_bytes
from unwall.tiers.ledger import TierName


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
    left = budget_bytes - sum(host_bytes_of(*pair) for pair in pairs) - host_working_bytes(sizes, homes)
    left -= chunks_bytes(sizes, homes)
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
