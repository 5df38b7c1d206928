"""Homes for a few groups, under every plan and every budget that changes anything, against all assignments the plan allows.

[Note: what greedy keeps and what it does not]
``place`` starts with every group at its slowest home and raises one group after the other. On the device that is as good as any
assignment, because every raise takes memory. On the host the last group to leave the disk also frees the buffers that the disk
needs (``host_working_bytes``), and a look at one group at a time does not see that; so all groups together are tried first. What
is left between "all" and "one after the other" is bounded. So what is asserted is:

- a host that holds everything leaves nothing on disk;

- whatever fits with every group at its slowest home stays within the budget, and more memory never makes a fitting plan unfit;
- host memory left over is less than those buffers and the smallest raise together, so the traffic to the disk per step exceeds
  the smallest possible one by no more than that many bytes could have saved.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from random import Random

import pytest

from unwall.plans import Plan, PlanError
from unwall.shards.home import DEVICE, DISK, HOST, LADDER, SPILLED, Home, Sizes, device_bytes_of, disk_bytes_of, host_bytes_of
from unwall.shards.placement import place
from unwall.shards.tally import Tally
from unwall.shards.working import (
    CHUNK_ELEMENTS,
    CHUNKS_IN_FLIGHT,
    RING_SLOT_BYTES,
    RING_SLOTS,
    chunk_bytes,
    chunk_elements,
    host_working_bytes,
    ring_slot_bytes,
    working_bytes,
)
from unwall.tiers.sizes import ALIGNMENT

TIERS = ("device", "host", "disk")
CHOICES = ("auto", *TIERS)
HOMES = [Home(*tiers, resident=resident) for *tiers, resident in itertools.product(TIERS, TIERS, TIERS, (False, True))]
OFF_DEVICE = [Home(*tiers) for tiers in itertools.product(("host", "disk"), repeat=3)]
SMALL, LARGE = 2048, 1 << 19
"""Elements: the smallest shard, and one of which a chunk is a sixteenth."""


def group(numel: int, trainable: bool = True, ranks: int = 1, passes: int = 1) -> Sizes:
    """A group of bf16 parameters with AdamW, ``numel`` elements of it on each rank."""
    return Sizes(
        shard_bytes=2 * numel,
        flat_bytes=2 * numel * ranks,
        state_bytes=10 * numel * trainable,
        grad_bytes=2 * numel * trainable,
        grad_flat_bytes=2 * numel * ranks * trainable,
        grad_part_bytes=2 * numel * trainable * (ranks > 1),
        widening_bytes=2 * numel * trainable,
        whole=ranks == 1,
        trainable=trainable,
        own_numel=numel,
        sum_bytes=4 * numel * trainable * (passes > 1),
    )


def models(unit: int, factors: Sequence[int], groups: Sequence[int]) -> Iterator[list[Sizes]]:
    for count in groups:
        for numels in itertools.product(factors, repeat=count):
            yield [group(unit * numel) for numel in numels]


def plans() -> Iterator[Plan]:
    """Every placement that ``unwall.shard`` accepts."""
    for params, grads, optimizer, disk in itertools.product(CHOICES, CHOICES, CHOICES, (None, "/fast")):
        states = params if optimizer == "auto" else optimizer
        if grads != "auto" and (grads == "device") != (states == "device"):
            continue
        try:
            yield Plan(params=params, grads=grads, optimizer=optimizer, disk=disk)
        except PlanError:
            assert disk is None


def allows(plan: Plan, trainable: bool, home: Home) -> bool:
    """Whether the plan leaves a group this home."""
    params, states, grads = plan.params, plan.optimizer, plan.grads
    if not trainable:
        states, grads = params, "auto"  # what is not updated lives with its parameters
    if states == "auto":
        states = params
    if states == "auto":
        on_ladder = home in (DEVICE, HOST) or (home in (SPILLED, DISK) and bool(plan.directories))
        return on_ladder and grads in ("auto", home.grads)
    if states == "device":
        return home == DEVICE
    places = {"auto": ("host", "disk") if states == "disk" else ("host",), "device": ("host",)}.get(params, (params,))
    landing = "disk" if grads == "disk" else "host"
    shard = home.params in places and home.resident == (params == "device")
    return shard and (home.states, home.grads) == (states, landing)


def rungs(plan: Plan, size: Sizes) -> list[Home]:
    """The homes a group may have, the fastest first."""
    found = [home for home in HOMES if allows(plan, size.trainable, home)]
    return sorted(found, key=lambda home: (TIERS.index(home.params), TIERS.index(home.states)))


def need(sizes: Sequence[Sizes], homes: Sequence[Home]) -> tuple[int, int]:
    """What an assignment takes of device and host, with what comes and goes."""
    pairs = list(zip(sizes, homes, strict=True))
    on_device = sum(device_bytes_of(size, home) for size, home in pairs) + working_bytes(sizes, homes)
    return on_device, sum(host_bytes_of(size, home) for size, home in pairs) + host_working_bytes(sizes, homes)


def traffic(sizes: Sequence[Sizes], homes: Sequence[Home]) -> int:
    """Bytes that go to or come from the disk per step: see [Note: ladder] in shards/home.py."""
    total = 0
    for size, home in zip(sizes, homes, strict=True):
        total += 3 * size.shard_bytes * (home.params == "disk")
        total += 2 * size.state_bytes * (home.states == "disk") + 2 * size.grad_bytes * (home.grads == "disk")
    return total


def around(values: set[int]) -> list[int]:
    """Every budget at which something changes: each need, and one byte less."""
    return sorted({max(0, value - less) for value in values for less in (0, 1)})


def mixed_models() -> list[list[Sizes]]:
    """A few groups: trained or frozen, one rank or two, one pass or several."""
    return [
        [group(SMALL), group(3 * SMALL)],
        [group(3 * SMALL, trainable=False), group(SMALL, passes=2)],
        [group(40 * SMALL, ranks=2), group(SMALL, trainable=False, ranks=2), group(2 * SMALL, ranks=2)],
        [group(LARGE), group(2 * LARGE, trainable=False), group(LARGE, passes=2)],
    ]


@pytest.mark.parametrize("sizes", mixed_models())
def test_what_the_plan_says_is_taken_literally(sizes):
    for plan in plans():
        for device_bytes, host_bytes in itertools.product((None, 0, 20 * SMALL, 80 * LARGE), repeat=2):
            homes = place(sizes, plan, device_bytes, host_bytes)
            assert len(homes) == len(sizes)
            for size, home in zip(sizes, homes, strict=True):
                assert allows(plan, size.trainable, home), (plan, size, home)
                if size.trainable and plan.optimizer != "auto":
                    assert home.states == plan.optimizer
                if plan.params == "device":
                    assert home.params == "device" or home.resident
                elif plan.params != "auto" and not (size.trainable and plan.optimizer == "device"):
                    assert home.params == plan.params  # an update on the device needs its parameters there
                if size.trainable and plan.grads != "auto":
                    assert home.grads == plan.grads


@pytest.mark.parametrize("sizes", mixed_models())
def test_without_limits_every_group_has_its_fastest_home(sizes):
    for plan in plans():
        assert place(sizes, plan, None, None) == [rungs(plan, size)[0] for size in sizes], plan


@pytest.mark.parametrize("sizes", mixed_models())
def test_the_device_budget_holds_where_any_assignment_holds_it(sizes):
    """The first groups go to the device, without gaps and as many as fit; a larger budget never holds fewer."""
    for plan in plans():
        ladders = [rungs(plan, size) for size in sizes]
        needs = {need(sizes, homes)[0] for homes in itertools.product(*ladders)}
        free = [index for index, ladder in enumerate(ladders) if len(ladder) > 1 and ladder[0] == DEVICE]
        held_before = 0
        for budget in around(needs):
            homes = place(sizes, plan, budget, None)
            assert need(sizes, homes)[0] <= max(budget, min(needs)), (plan, budget)
            held = [index for index in free if homes[index] == DEVICE]
            assert held == free[: len(held)], (plan, budget)
            assert len(held) >= held_before, (plan, budget)
            held_before = len(held)
            if held != free:
                more = [DEVICE if index == free[len(held)] else home for index, home in enumerate(homes)]
                assert need(sizes, more)[0] > budget, (plan, budget)


def check_host(sizes: Sequence[Sizes], plan: Plan, device_bytes: int | None) -> None:
    """Every host budget for one device budget. See [Note: what greedy keeps and what it does not]."""
    at_best = place(sizes, plan, device_bytes, None)
    ladders = [[DEVICE] if home == DEVICE else rungs(plan, size) for size, home in zip(sizes, at_best, strict=True)]
    ladders = [[home for home in ladder if home != DEVICE] or [DEVICE] for ladder in ladders]
    slowest = [ladder[-1] for ladder in ladders]
    table = {homes: (need(sizes, homes)[1], traffic(sizes, homes)) for homes in itertools.product(*ladders)}
    buffers = host_working_bytes(sizes, slowest)
    fitted = False
    for budget in around({host for host, _ in table.values()}):
        homes = tuple(place(sizes, plan, device_bytes, budget))
        assert homes in table, (plan, budget)  # the host's budget does not change what is on the device
        taken, moved = table[homes]
        assert taken <= max(budget, need(sizes, slowest)[1]), (plan, budget)
        fits = taken <= budget
        assert fits or not fitted, (plan, budget)
        fitted = fits
        if homes == tuple(ladder[0] for ladder in ladders):
            continue
        held = sum(host_bytes_of(size, home) for size, home in zip(sizes, homes, strict=True))
        raises = [
            host_bytes_of(size, better) - host_bytes_of(size, home)
            for size, home, ladder in zip(sizes, homes, ladders, strict=True)
            for better in ladder[: ladder.index(home)]
        ]
        assert held + min(raises) + buffers > budget, (plan, budget)
        smallest = min((least for host, least in table.values() if host <= budget), default=moved)
        assert moved - smallest <= 3 * (buffers + max(raises)), (plan, budget)  # three transfers per byte at most


@pytest.mark.parametrize("sizes", mixed_models())
def test_the_host_budget_under_every_plan(sizes):
    for plan in plans():
        some = place(sizes, plan, None, None).count(DEVICE) // 2
        part = need(sizes, [DEVICE] * some + [DISK] * (len(sizes) - some))[0]
        for device_bytes in (None, 0, part):
            check_host(sizes, plan, device_bytes)


@pytest.mark.parametrize(
    ("unit", "factors", "groups"),
    [(SMALL, (1, 2, 5, 40), (2, 3)), (LARGE, (1, 2, 5, 40), (2, 3)), (SMALL, (1, 40), (4,)), (LARGE, (1, 5), (4,))],
)
def test_the_host_budget_for_every_mixture_of_sizes(unit, factors, groups):
    for sizes in models(unit, factors, groups):
        check_host(sizes, Plan(disk="/fast"), device_bytes=0)


def test_a_host_that_holds_everything_leaves_nothing_on_disk():
    for sizes in (*models(SMALL, (1, 5, 40), (1, 2, 3)), *models(LARGE, (1, 5, 40), (1, 2, 3))):
        least = sum(host_bytes_of(size, HOST) for size in sizes)
        for budget in (least, least + 1, 2 * least):
            assert place(sizes, Plan(disk="/fast"), 0, budget) == [HOST] * len(sizes)


def test_parameters_and_gradients_get_the_host_before_optimizer_state():
    for sizes in models(LARGE, (1, 2, 5), (2, 3)):
        everyone = [SPILLED] * len(sizes)
        budget = sum(host_bytes_of(size, SPILLED) for size in sizes) + host_working_bytes(sizes, [DISK] * len(sizes))
        for home in place(sizes, Plan(disk="/fast"), 0, budget):
            assert home in (SPILLED, HOST)
        assert need(sizes, everyone)[1] <= budget


def test_second_copies_that_the_device_holds_take_nothing_of_the_host():
    sizes = [replace(group(LARGE, ranks=2), replica_bytes=2 * LARGE)] * 3
    wanted = [replace(DEVICE, replica="device"), HOST, HOST]
    device_bytes, host_bytes = need(sizes, wanted)
    assert place(sizes, Plan(disk="/fast"), device_bytes, host_bytes) == wanted


@pytest.mark.parametrize("sizes", mixed_models())
def test_every_state_is_counted_on_exactly_one_tier(sizes):
    for size, home in itertools.product(sizes, LADDER):
        states = size.shard_bytes + size.state_bytes + size.grad_bytes
        beside = {"device": size.widening_bytes, "host": size.sum_bytes, "disk": size.widening_bytes}[home.grads]
        gathered = size.flat_bytes - size.shard_bytes if home == DEVICE and size.whole else 0
        counted = device_bytes_of(size, home) + host_bytes_of(size, home) + disk_bytes_of(size, home)
        assert counted == states + beside + gathered


@pytest.mark.parametrize("sizes", [*mixed_models(), [group(64 * LARGE), group(SMALL)]])
def test_what_the_disk_needs_on_the_host_covers_chunks_and_rings(sizes):
    for homes in itertools.product([DEVICE, *OFF_DEVICE], repeat=len(sizes)):
        pairs = list(zip(sizes, homes, strict=True))
        on_disk = [(size, home) for size, home in pairs if home.on_disk]
        elements, slot, total = chunk_elements(sizes, homes), ring_slot_bytes(sizes, homes), host_working_bytes(sizes, homes)
        if not on_disk:
            assert (elements, total) == (0, 0)
            continue
        largest = max(size.own_numel for size, _ in on_disk)
        assert elements % ALIGNMENT == 0
        assert elements == CHUNK_ELEMENTS or largest <= 16 * elements < largest + 16 * ALIGNMENT
        widest = max(max(size.shard_bytes, size.grad_bytes) for size, _ in on_disk)
        assert slot % ALIGNMENT == 0
        assert slot == RING_SLOT_BYTES or widest <= RING_SLOTS * slot < widest + RING_SLOTS * ALIGNMENT
        for size, home in pairs:
            parts = [(size.shard_bytes, home.params), (size.state_bytes, home.states), (size.grad_bytes, home.grads)]
            held = sum(nbytes for nbytes, tier in parts if tier == "disk")
            assert chunk_bytes(size, home, elements) * size.own_numel >= held * min(elements, size.own_numel)
            assert (chunk_bytes(size, home, elements) == 0) == (held == 0)
        directions = any(home.params == "disk" for home in homes) + any(home.grads == "disk" for home in homes)
        chunks = CHUNKS_IN_FLIGHT * max(chunk_bytes(size, home, elements) for size, home in pairs)
        looked_at = 8 * largest
        assert total >= chunks + directions * RING_SLOTS * slot + looked_at


@pytest.mark.parametrize("sizes", mixed_models())
def test_a_faster_home_never_adds_to_what_comes_and_goes(sizes):
    for homes in itertools.product(LADDER, repeat=len(sizes)):
        for index, home in enumerate(homes):
            if home == DEVICE:
                continue
            better = [*homes[:index], LADDER[LADDER.index(home) - 1], *homes[index + 1 :]]
            assert host_working_bytes(sizes, better) <= host_working_bytes(sizes, homes)
            assert working_bytes(sizes, better) <= working_bytes(sizes, homes)
            assert need(sizes, better)[0] >= need(sizes, homes)[0]


def test_groups_counted_by_kind_take_what_they_take_one_by_one():
    random = Random(0)
    sizes = [group(SMALL * random.choice((1, 2, 3)), trainable=random.random() < 0.8, passes=2) for _ in range(40)]
    homes = [random.choice(HOMES) for _ in sizes]
    tally = Tally(sizes, [DISK] * len(sizes))
    for index, home in enumerate(homes):
        tally.move(index, home)
        now = [*homes[: index + 1], *[DISK] * (len(sizes) - index - 1)]
        assert tally.homes == now
        for bytes_of in (device_bytes_of, host_bytes_of, disk_bytes_of):
            assert tally.held_bytes(bytes_of) == sum(bytes_of(*pair) for pair in zip(sizes, now, strict=True))
        for working in (working_bytes, host_working_bytes, ring_slot_bytes):
            assert working(*tally.some()) == working(sizes, now)
