"""Updates that run ahead of ``step``: always the bits of a synchronous step, whatever happens between backward and step."""

import errno
import time

import pytest
import torch
from torch import nn

import unwall
from unwall.optim import early
from unwall.optim.updates import HostUpdate
from unwall.plan import Plan

HOST = {"params": "host", "optimizer": "host"}


@pytest.fixture(autouse=True)
def _few_quiet_steps(monkeypatch):
    """Speculation starts after two steps without clipping instead of eight: shorter runs, the same decisions."""
    monkeypatch.setattr(early, "CLIP_MEMORY", 2)


@pytest.fixture(params=["host", "states on disk", "gradients on disk", "disk"])
def place(request, tmp_path):
    """Plans whose updates run on the host, the states in memory, on disk, or on both."""
    disk = {"disk": tmp_path}
    return {
        "host": HOST,
        "states on disk": {"params": "host", "optimizer": "disk", **disk},
        "gradients on disk": {**HOST, "grads": "disk", **disk},
        "disk": {"params": "disk", "optimizer": "disk", **disk},
    }[request.param]


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


def let_it_run():
    """Waits for what runs ahead. The queue is first in, first out."""
    HostUpdate(lambda: None, object()).wait()


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
        let_it_run()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
@pytest.mark.parametrize("clip", [None, 1e6])
def test_a_speculated_update_that_is_committed(place, dtype, clip):
    stats = same(lambda model, optimizer: steps(model, optimizer, 7), place, dtype=dtype, max_grad_norm=clip)
    assert stats.speculated.committed > 0
    assert stats.speculated.missed == 0


def test_clipping_that_becomes_active_redoes_the_update_and_then_pauses(place):
    def scenario(model, optimizer):
        steps(model, optimizer, 5)
        steps(model, optimizer, 1, first=5, scale=1e4)
        steps(model, optimizer, 1, first=6, scale=1e4)

    stats = same(scenario, place, max_grad_norm=1e3)
    groups = stats.speculated.missed
    assert stats.speculated.committed > 0
    assert 0 < groups < 20  # the first active step missed, the second one did not speculate


def test_clipping_in_every_step_is_never_speculated_on():
    stats = same(lambda model, optimizer: steps(model, optimizer, 5), max_grad_norm=1e-3)
    assert (stats.speculated.committed, stats.speculated.missed) == (0, 0)


def test_a_second_backward_before_the_step_adds_up(place):
    def scenario(model, optimizer):
        steps(model, optimizer, 3)
        backward(model, 10)
        backward(model, 11)
        optimizer.step()
        optimizer.zero_grad()
        steps(model, optimizer, 1, first=20)

    assert same(scenario, place).speculated.missed > 0


def test_a_learning_rate_changed_before_the_step_counts(place):
    def scenario(model, optimizer):
        steps(model, optimizer, 3)
        backward(model, 10)
        optimizer.param_groups[0]["lr"] = 1e-3
        optimizer.step()

    assert same(scenario, place).speculated.missed > 0


def test_a_step_that_never_comes_changes_nothing(place):
    def scenario(model, optimizer):
        steps(model, optimizer, 3)
        backward(model, 10)
        optimizer.zero_grad()
        steps(model, optimizer, 2, first=20)

    same(scenario, place)


def test_looking_at_the_model_between_backward_and_step_shows_the_old_values(place):
    model, optimizer = start(place)
    steps(model, optimizer, 3)
    before = outcome(model, optimizer)
    backward(model, 10)
    after = outcome(model, optimizer)
    assert all(torch.equal(before[name], after[name]) for name in before)
    optimizer.step()
    assert not torch.equal(before["0.0.weight"], model.state_dict()["0.0.weight"])


def test_clip_grad_norm_called_by_hand_counts(place):
    def scenario(model, optimizer):
        steps(model, optimizer, 3)
        backward(model, 10)
        optimizer.clip_grad_norm_(1e-3)
        optimizer.step()

    assert same(scenario, place).speculated.missed > 0


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


def on_disk(folder):
    return {"params": "disk", "optimizer": "disk", "disk": folder}


def test_extents_of_committed_updates_are_the_next_shadows(tmp_path):
    stats = same(lambda model, optimizer: steps(model, optimizer, 12), on_disk(tmp_path))
    needed = 6 * 16640 * 14 + 520 * 14  # parameters, gradients, states; none is more than doubled
    assert stats.speculated.committed > 12
    assert stats.tiers["disk"].peak_bytes <= 2 * needed + 40 * 4096  # each block is rounded up to 4096


def test_no_room_on_disk_means_no_speculation(tmp_path):
    model, optimizer = start(on_disk(tmp_path))
    steps(model, optimizer, 1)
    needed = unwall.stats(model).tiers["disk"].live_bytes
    stats = same(lambda model, optimizer: steps(model, optimizer, 5), {**on_disk(tmp_path), "disk_bytes": needed})
    assert stats.speculated.committed == 0
    assert stats.tiers["disk"].peak_bytes == needed


@pytest.mark.parametrize("operation", ["read", "write"])
def test_a_drive_that_fails_ahead_of_the_step_costs_the_speculation_only(operation, tmp_path):
    committed = []

    def scenario(model, optimizer):
        steps(model, optimizer, 4)
        tiers = unwall.api.engine(model).tiers
        committed.append(unwall.stats(model).speculated.committed)
        if tiers.disk is not None:
            tiers.disk.engine.inject_fault(operation, 1, 10**6, errno.EIO)
        backward(model, 10)  # nothing but updates ahead of the step uses the drive now
        let_it_run()
        if tiers.disk is not None:
            tiers.disk.engine.inject_fault(operation, 0, 0, errno.EIO)
            assert tiers.chunks.in_use == 0
        optimizer.step()
        committed.append(unwall.stats(model).speculated.committed)
        optimizer.zero_grad()
        steps(model, optimizer, 3, first=20)

    stats = same(scenario, {"params": "host", "optimizer": "disk", "disk": tmp_path})
    before, after = committed[-2:]
    assert 0 < before == after < stats.speculated.committed


def test_an_update_through_the_disk_stops_when_it_is_not_wanted_any_more(tmp_path):
    model = nn.Sequential(
        *(nn.Linear(256, 256, bias=False) for _ in range(4))
    )  # groups of 16 chunks: six are under way at once
    unwall.shard(model, Plan(params="host", optimizer="disk", disk=tmp_path))
    optimizer = unwall.AdamW(model.parameters())
    engine = unwall.api.engine(model).tiers.disk.engine
    written = []
    for _ in range(3):
        model(torch.randn(4, 256)).square().mean().backward()
        optimizer.step()
        written.append(unwall.stats(model).links["host>disk"].moved_bytes)
    engine.throttle("read", 1e6)  # a group takes half a second
    model(torch.randn(4, 256)).square().mean().backward()
    time.sleep(0.05)  # the update of the first one has begun
    optimizer.zero_grad()
    engine.throttle("read", 0)
    let_it_run()
    extra = unwall.stats(model).links["host>disk"].moved_bytes - written[-1]
    assert 0 < extra < (written[-1] - written[-2]) / 4 * 0.6


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
