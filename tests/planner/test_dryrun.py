"""The engine's sharding code at any scale, without memory."""

import dataclasses

import pytest
import torch
import torch.distributed as dist
from planner_tools import MACHINE, decoder

from unwall.planner import dryrun
from unwall.planner.choose import ChosenPlan, choose
from unwall.planner.description import from_shape
from unwall.planner.hardware import load
from unwall.planner.outline import skeleton
from unwall.shards.build import plan_groups, sizes_of
from unwall.shards.home import DISK as DISK_HOME
from unwall.shards.home import disk_bytes_of
from unwall.shards.tiles import forced

DISK = {"params": "disk", "grads": "disk", "optimizer": "disk", "disk": "/fast"}


@pytest.mark.parametrize("ranks", [1, 2, 7, 1024])
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"params": "host", "optimizer": "host"},
        {"params": "device", "optimizer": "host", "stage": 2},
        {"stage": 0},
        {"stage": 1, "compute_dtype": torch.float32},
        {"compute_dtype": torch.float16, **DISK},
    ],
    ids=str,
)
def test_small_models_on_any_number_of_ranks(fields, ranks):
    found = dryrun.dry_run(decoder(width=128), ChosenPlan(ranks=ranks, **fields))
    assert found.tried == tuple(sorted({0, ranks // 2, ranks - 1}))
    assert sum(found.bytes_held.values()) >= found.formula_bytes
    assert not dist.is_initialized()


def test_the_model_is_left_alone():
    outline = decoder()
    before = list(outline.module.named_parameters())
    dryrun.dry_run(outline, ChosenPlan(ranks=2))
    assert [(name, id(param)) for name, param in outline.module.named_parameters()] == [(n, id(p)) for n, p in before]
    assert all(param.is_meta and param.dtype is torch.float32 for _, param in before)


def test_1t_on_one_dgx2():
    """16 bytes per parameter in fp16 with its gradient, 14 without: 880 GB on each of 16 ranks."""
    outline = skeleton(from_shape("128x25600"))
    plan = ChosenPlan(ranks=16, compute_dtype=torch.float16, **DISK)
    found = dryrun.dry_run(outline, plan, tried=[15])
    assert found.params == 12 * 128 * 25600**2
    assert found.bytes_held["disk"] == pytest.approx(14 * found.params / 16, rel=1e-3)
    assert found.bytes_held["disk"] < load("dgx-2").disk_bytes / 16


def test_32t_on_32_dgx2():
    """All of it as sizes, and a slice of it sharded (all of it takes 20 s: docs/planner.md)."""
    plan = ChosenPlan(ranks=512, compute_dtype=torch.float16, **DISK)
    plan = dataclasses.replace(plan, tiles=9)
    module = skeleton(from_shape("398x81920")).module
    planned = plan_groups(module, plan, 512, forced(module, plan))
    held = sum(disk_bytes_of(size, DISK_HOME) for size in sizes_of(planned, plan, 512))
    params = 12 * 398 * 81920**2
    assert params > 32e12
    assert held == pytest.approx(18 * params / 512, rel=1e-3)  # 14, and the gradient, which may grow to fp32
    assert held < load("dgx-2").disk_bytes / 16
    found = dryrun.dry_run(skeleton(from_shape("8x81920")), plan)
    assert found.tried == (0, 256, 511)
    assert found.bytes_held["disk"] == pytest.approx(14 * found.params / 512, rel=1e-3)


def test_a_disagreement_is_named(monkeypatch):
    real = dryrun._expected
    monkeypatch.setattr(dryrun, "_expected", lambda *given: {tier: nbytes + 1 for tier, nbytes in real(*given).items()})
    with pytest.raises(dryrun.DryRunError, match=r"rank 0 holds \d+ bytes on the device, shards/home.py counts"):
        dryrun.dry_run(decoder(), ChosenPlan(ranks=4))


def test_a_formula_that_is_wrong_is_noticed(monkeypatch):
    real = dryrun._formula
    monkeypatch.setattr(dryrun, "_formula", lambda *given, **more: 1.5 * real(*given, **more))
    with pytest.raises(dryrun.DryRunError, match="the formula gives"):
        dryrun.dry_run(decoder(), ChosenPlan(ranks=4))


def test_too_many_ranks():
    with pytest.raises(dryrun.DryRunError, match="1 to 1024 ranks, got 2048"):
        dryrun.dry_run(decoder(), ChosenPlan(ranks=2048))


def test_a_chosen_plan_can_be_rehearsed():
    many = dataclasses.replace(MACHINE, devices_per_node=4, collective_bytes_per_s=1e10)
    outline = decoder()
    assert dryrun.dry_run(outline, choose(outline, many)).ranks == 4
