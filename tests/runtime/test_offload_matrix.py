"""Where states live changes nothing but speed: each placement gives the bits of a run with everything on the device."""

import itertools

import pytest
import torch
from offload import DEVICE, DISK, HOST, Setup, differing, few_chunks, mixed_plan, train

TIERS = ("device", "host", "disk")
PLACEMENTS = [
    {"params": params, "grads": grads, "optimizer": optimizer}
    for params, grads, optimizer in itertools.product(TIERS, TIERS, TIERS)
    if (grads == "device") == (optimizer == "device")  # gradients land where the update runs
]
MIXED = {"mixed": "by budget"}
"""Stands for "auto" with budgets that put some groups on each of the three tiers."""
FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16


@few_chunks()
def compare(setup, placements, folder):
    """Names of what differs from the run on the device, for each placement."""
    expected, _ = train(setup, DEVICE, folder)
    wrong = []
    for placement in placements:
        got, tiers = train(setup, mixed_plan(setup, folder) if placement == MIXED else placement, folder)
        wrong += [f"{placement}: {name}" for name in differing(expected, got)]
        if placement.get("optimizer", "disk") not in tiers:
            wrong.append(f"{placement}: groups are at home on {tiers}")
    return wrong


# Each placement meets each dtype, and each of the other choices with and without.
ONE_RANK = [
    Setup(dtype=FP32),
    Setup(dtype=BF16, clip=0.5, passes=3, frozen=True),
    Setup(dtype=FP16, clip=0.5, steps=4),
]


@pytest.mark.parametrize("setup", ONE_RANK, ids=["fp32", "bf16-clip-3-frozen", "fp16-clip"])
def test_every_placement_of_every_state(setup, tmp_path):
    assert compare(setup, [*PLACEMENTS, MIXED], str(tmp_path)) == []


REST = [
    Setup(dtype=FP32, clip=0.5, passes=3),
    Setup(dtype=FP32, frozen=True, passes=3),
    Setup(dtype=BF16),
    Setup(dtype=BF16, clip=0.5, steps=12),
    Setup(dtype=BF16, clip=1e6, steps=12),  # never active
    Setup(dtype=FP16, passes=3, frozen=True, steps=4),
]


@pytest.mark.parametrize("setup", REST, ids=str)
def test_typical_placements(setup, tmp_path):
    assert compare(setup, [HOST, {"params": "host", "optimizer": "disk"}, DISK, MIXED], str(tmp_path)) == []


# With several ranks the placements are dealt out over the setups: each appears with each stage.
TWO_RANKS = [
    Setup(stage=1, dtype=BF16, clip=0.5, passes=3, no_sync=True),
    Setup(stage=2, dtype=FP32, passes=3, no_sync=True, frozen=True),
    Setup(stage=3, dtype=BF16, passes=3, no_sync=True),
    Setup(stage=1, dtype=FP16, passes=3, frozen=True, steps=4),
    Setup(stage=2, dtype=BF16, clip=0.5),
    Setup(stage=3, dtype=FP32, clip=0.5, passes=3, frozen=True),
]
SPREAD = [
    {"params": "disk", "grads": "disk", "optimizer": "disk"},
    {"params": "disk", "grads": "host", "optimizer": "host"},
    {"params": "device", "grads": "disk", "optimizer": "disk"},
    {"params": "host", "grads": "host", "optimizer": "disk"},
    {"params": "disk", "grads": "device", "optimizer": "device"},
    {"params": "host", "grads": "disk", "optimizer": "host"},
    HOST,
    {"params": "device", "grads": "host", "optimizer": "host"},
]


@pytest.mark.parametrize("number", range(len(TWO_RANKS)), ids=[str(setup) for setup in TWO_RANKS])
def test_two_ranks(ranks, number, tmp_path):
    setup = TWO_RANKS[number]
    placements = SPREAD[(number // 3) % 2 :: 2]
    if not setup.no_sync:  # whole gradients stay on the device there: test_offload_budgets.py has that with a tight budget
        placements = [MIXED, *placements]
    assert ranks(2).run(compare, setup, placements, str(tmp_path)) == [[], []]


FOUR_RANKS = [
    Setup(stage=1, dtype=FP32, clip=0.5, blocks=24),
    Setup(stage=2, dtype=BF16, frozen=True, blocks=24),
    Setup(stage=3, dtype=BF16, clip=0.5, passes=3, blocks=24),
]


@pytest.mark.parametrize("setup", FOUR_RANKS, ids=str)
def test_four_ranks(ranks, setup, tmp_path):
    assert ranks(4).run(compare, setup, [DISK, MIXED], str(tmp_path)) == [[], [], [], []]
