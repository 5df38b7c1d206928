"""The habits of test_habits_drill.py with a model that was given in bf16: the same bits on every tier, and what plain PyTorch
gives, up to its own rounding. Plain PyTorch has no master; how far it is from itself in fp32 says what that costs."""

import pytest
import test_habits_drill as habits
import torch
from offload import smallest

import unwall
from unwall.plans import Plan


def given(dtype):
    """The same values in every dtype."""
    return habits.build().to(torch.bfloat16).to(dtype)


def trained(habit, dtype, folder, tier=None):
    """Final values: with plain PyTorch, or on a tier."""
    model = given(dtype)
    make = torch.optim.AdamW
    if tier is not None:
        fields = {"compute_dtype": dtype, "disk": folder, **habits.TIERS[tier]}
        tight = {} if tier == "device" else {"device_bytes": smallest(model, "device_bytes", **fields)}
        unwall.shard(model, Plan(**fields, **tight))
        make = unwall.AdamW
    return habits.train(model, make(model.parameters(), lr=1e-2, eps=1e-3), habit)


def trained_on_a_rank(name, tier, folder):
    """The same in a rank process, with batches in bf16. Two ranks see the same ones, so their average is that of one."""
    torch.set_num_threads(1)
    habit, batch = getattr(habits, name), habits.batch
    habits.batch = lambda seed: batch(seed).to(torch.bfloat16)
    try:
        return trained(habit, torch.bfloat16, folder, tier)
    finally:
        habits.batch = batch


@pytest.fixture
def in_dtype(monkeypatch):
    """Batches and other models of the habits have the dtype of the model, as plain PyTorch wants it."""
    batch = habits.batch

    def choose(dtype):
        monkeypatch.setattr(habits, "batch", lambda seed: batch(seed).to(dtype))
        return dtype

    return choose


@pytest.mark.drill
@pytest.mark.parametrize("habit", [*habits.AFTER_STEP, *habits.BEFORE_STEP], ids=lambda habit: habit.__name__)
def test_a_habit_with_a_bf16_model(habit, in_dtype, tmp_path):
    exact, plain = (trained(habit, in_dtype(dtype), tmp_path) for dtype in (torch.float32, torch.bfloat16))
    on_device, on_host, on_disk = (trained(habit, torch.bfloat16, str(tmp_path), tier) for tier in habits.TIERS)
    for name, value in on_device.items():
        rounding = float((plain[name] - exact[name]).abs().max())
        away = min(float((value - other[name]).abs().max()) for other in (plain, exact))
        assert away <= 2 * rounding + 2e-3, name
    assert habits.differing({habit.__name__: on_device}, {habit.__name__: on_host}, exact=True) == {}
    assert habits.differing({habit.__name__: on_device}, {habit.__name__: on_disk}, exact=True) == {}


@pytest.mark.drill
@pytest.mark.parametrize("tier", habits.TIERS)
def test_habits_with_a_bf16_model_on_two_ranks(ranks, tier, tmp_path):
    for habit in (*habits.AFTER_STEP, *habits.BEFORE_STEP):
        alone = trained_on_a_rank(habit.__name__, "device", str(tmp_path))
        both = ranks(2).run(trained_on_a_rank, habit.__name__, tier, str(tmp_path))
        assert habits.differing({habit.__name__: alone}, {habit.__name__: both[0]}, exact=True) == {}
