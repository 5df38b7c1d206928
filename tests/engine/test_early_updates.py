"""Updates that run ahead of ``step``: always the bits of a synchronous step, whatever happens between backward and step."""

import pytest
import torch
from torch import nn

import unwall
from unwall.optim import early
from unwall.plan import Plan

HOST = {"params": "host", "optimizer": "host"}


@pytest.fixture(autouse=True)
def _few_quiet_steps(monkeypatch):
    """Speculation starts after two steps without clipping instead of eight: shorter runs, the same decisions."""
    monkeypatch.setattr(early, "CLIP_MEMORY", 2)


def build():
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64)) for _ in range(6)]
    return nn.Sequential(*blocks, nn.Linear(64, 8))


def start(plan, dtype=torch.bfloat16, **options):
    model = build()
    unwall.shard(model, Plan(compute_dtype=dtype, **plan))
    return model, unwall.AdamW(model.parameters(), lr=1e-2, **options)


def backward(model, seed, scale=1.0):
    torch.manual_seed(seed)
    inputs, target = torch.randn(16, 64), torch.randn(16, 8)
    ((model(inputs).float() - target).square().mean() * scale).backward()


def outcome(model, optimizer):
    states = optimizer.state_dict()["state"]
    moments = {f"{number}.{name}": value for number, entry in states.items() for name, value in entry.items()}
    return {**model.state_dict(), **moments}


def same(scenario, host_plan=HOST, dtype=torch.bfloat16, **options):
    """Runs a scenario with everything on the device (where nothing runs ahead) and on the host; returns the host's stats."""
    results = []
    for plan in ({"params": "device", "optimizer": "device"}, host_plan):
        model, optimizer = start(plan, dtype, **options)
        scenario(model, optimizer)
        results.append(outcome(model, optimizer))
    expected, got = results
    assert [name for name in expected if not torch.equal(expected[name], got[name])] == []
    return unwall.stats(model)


def steps(model, optimizer, count, first=0, scale=1.0):
    for seed in range(first, first + count):
        backward(model, seed, scale)
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
@pytest.mark.parametrize("clip", [None, 1e6])
def test_a_speculated_update_that_is_committed(dtype, clip):
    stats = same(lambda model, optimizer: steps(model, optimizer, 7), dtype=dtype, max_grad_norm=clip)
    assert stats.speculated.committed > 0
    assert stats.speculated.missed == 0


def test_clipping_that_becomes_active_redoes_the_update_and_then_pauses():
    def scenario(model, optimizer):
        steps(model, optimizer, 5)
        steps(model, optimizer, 1, first=5, scale=1e4)
        steps(model, optimizer, 1, first=6, scale=1e4)

    stats = same(scenario, max_grad_norm=1e3)
    groups = stats.speculated.missed
    assert stats.speculated.committed > 0
    assert 0 < groups < 20  # the first active step missed, the second one did not speculate


def test_clipping_in_every_step_is_never_speculated_on():
    stats = same(lambda model, optimizer: steps(model, optimizer, 5), max_grad_norm=1e-3)
    assert (stats.speculated.committed, stats.speculated.missed) == (0, 0)


def test_a_second_backward_before_the_step_adds_up():
    def scenario(model, optimizer):
        steps(model, optimizer, 3)
        backward(model, 10)
        backward(model, 11)
        optimizer.step()
        optimizer.zero_grad()
        steps(model, optimizer, 1, first=20)

    assert same(scenario).speculated.missed > 0


def test_a_learning_rate_changed_before_the_step_counts():
    def scenario(model, optimizer):
        steps(model, optimizer, 3)
        backward(model, 10)
        optimizer.param_groups[0]["lr"] = 1e-3
        optimizer.step()

    assert same(scenario).speculated.missed > 0


def test_a_step_that_never_comes_changes_nothing():
    def scenario(model, optimizer):
        steps(model, optimizer, 3)
        backward(model, 10)
        optimizer.zero_grad()
        steps(model, optimizer, 2, first=20)

    same(scenario)


def test_looking_at_the_model_between_backward_and_step_shows_the_old_values():
    model, optimizer = start(HOST)
    steps(model, optimizer, 3)
    before = outcome(model, optimizer)
    backward(model, 10)
    after = outcome(model, optimizer)
    assert all(torch.equal(before[name], after[name]) for name in before)
    optimizer.step()
    assert not torch.equal(before["0.0.weight"], model.state_dict()["0.0.weight"])


def test_clip_grad_norm_called_by_hand_counts():
    def scenario(model, optimizer):
        steps(model, optimizer, 3)
        backward(model, 10)
        optimizer.clip_grad_norm_(1e-3)
        optimizer.step()

    assert same(scenario).speculated.missed > 0


def test_shadows_stay_within_the_host_budget():
    model, optimizer = start(HOST)
    steps(model, optimizer, 1)
    needed = unwall.stats(model).tiers["host"].live_bytes
    budget = int(needed * 1.3)
    stats = same(lambda model, optimizer: steps(model, optimizer, 6), {**HOST, "host_bytes": budget})
    assert stats.speculated.committed > 0
    assert needed < stats.tiers["host"].peak_bytes <= budget


def test_no_memory_for_shadows_means_no_speculation():
    model, optimizer = start(HOST)
    steps(model, optimizer, 1)
    needed = unwall.stats(model).tiers["host"].live_bytes
    stats = same(lambda model, optimizer: steps(model, optimizer, 6), {**HOST, "host_bytes": needed})
    assert stats.speculated.committed == 0


# -- update_in_backward ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_update_in_backward_gives_the_same_bits(tier, tmp_path):
    plan = {"params": tier, "optimizer": tier, **({"disk": tmp_path} if tier == "disk" else {})}
    stats = same(lambda model, optimizer: steps(model, optimizer, 5), plan, update_in_backward=True)
    assert stats.speculated.committed == 0  # no shadow was needed


def test_update_in_backward_refuses_a_second_backward():
    model, _optimizer = start(HOST, update_in_backward=True)
    backward(model, 0)
    with pytest.raises(RuntimeError, match="second backward"):
        backward(model, 1)


def test_update_in_backward_refuses_numbers_that_changed():
    model, optimizer = start(HOST, update_in_backward=True)
    backward(model, 0)
    optimizer.param_groups[0]["lr"] = 1.0
    with pytest.raises(RuntimeError, match="learning rate"):
        optimizer.step()


def test_update_in_backward_refuses_to_forget_gradients_it_has_used():
    model, optimizer = start(HOST, update_in_backward=True)
    backward(model, 0)
    with pytest.raises(RuntimeError, match="zero_grad"):
        optimizer.zero_grad()


def test_update_in_backward_cannot_clip():
    model = build()
    unwall.shard(model, Plan(**HOST))
    with pytest.raises(ValueError, match="cannot clip"):
        unwall.AdamW(model.parameters(), max_grad_norm=1.0, update_in_backward=True)


def on_ranks(stage, folder):
    """Each rank's own outcome on the host against everything on the device: names of what differs."""
    early.CLIP_MEMORY = 2
    wrong = []
    disk = {"params": "disk", "optimizer": "disk", "disk": folder}
    cases = [
        ({**HOST, "stage": stage}, {}),
        ({**HOST, "stage": stage}, {"max_grad_norm": 1e6}),
        ({**HOST, "stage": stage}, {"update_in_backward": True}),
        ({**disk, "stage": stage}, {"update_in_backward": True}),
    ]
    for plan, options in cases:
        results = []
        for place in ({"params": "device", "optimizer": "device", "stage": stage}, plan):
            model, optimizer = start(place, **(options if place is plan else {}))
            steps(model, optimizer, 5)
            results.append(outcome(model, optimizer))
            stats = unwall.stats(model)
        wrong += [f"{options} {name}" for name in results[0] if not torch.equal(results[0][name], results[1][name])]
        if not options and not stats.speculated.committed:
            wrong.append("nothing was speculated")
    return wrong


@pytest.mark.parametrize("stage", [1, 3])
def test_updates_ahead_on_two_ranks(ranks, stage, tmp_path):
    assert ranks(2).run(on_ranks, stage, str(tmp_path)) == [[], []]
