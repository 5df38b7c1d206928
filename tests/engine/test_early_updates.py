"""Updates that run ahead of ``step``: always the bits of a synchronous step, whatever happens between backward and step."""

import errno
import gc
import shutil
import threading
import time

import pytest
import torch
from torch import nn

import unwall
from unwall.optim import early
from unwall.optim.updates import HostUpdate
from unwall.plan import Plan
from unwall.shards.states import PARAM

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


def wait_until(happened):
    end = time.monotonic() + 10
    while not happened():
        assert time.monotonic() < end
        time.sleep(0.001)


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


def test_of_the_gradients_that_wait_the_newest_is_used_first(monkeypatch):
    """It is the one that the next forward needs first."""
    order, run = [], early.Speculation.run

    def noted(speculation):
        order.append(speculation.stores[PARAM].label)
        run(speculation)

    monkeypatch.setattr(early.Speculation, "run", noted)
    model, optimizer = start(HOST)
    steps(model, optimizer, 3)
    order.clear()
    go_on = threading.Event()
    HostUpdate(lambda: go_on.wait(10), object())  # the update thread has other work
    backward(model, 10)
    wait_until(lambda: all(found.landed for found in optimizer._early._speculations.values()))
    go_on.set()
    let_it_run()
    assert len(order) > 3
    in_the_model = [group.param.label for group in unwall.api.engine(model).groups]
    assert order == sorted(order, key=in_the_model.index)


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
    wait_until(lambda: any(found.progress is early.Progress.RUNNING for found in optimizer._early._speculations.values()))
    time.sleep(0.05)  # and has submitted what it has slots for
    optimizer.zero_grad()
    engine.throttle("read", 0)
    let_it_run()
    extra = unwall.stats(model).links["host>disk"].moved_bytes - written[-1]
    assert 0 < extra < (written[-1] - written[-2]) / 4 * 0.6


class Branches(nn.Module):
    """Uses the layers that it is told to."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleDict({name: nn.Linear(192, 192, bias=False) for name in "abcd"})

    def forward(self, x, use):
        for name in use:
            x = torch.tanh(self.layers[name](x))
        return x


def branching(plan, fault):
    """b's commit falls behind the failed update of a; c is speculated on before b's commit is tried again."""
    torch.manual_seed(0)
    model = Branches()
    unwall.shard(model, Plan(compute_dtype=torch.bfloat16, **plan))
    optimizer = unwall.AdamW(model.parameters(), lr=1e-2)
    engine = unwall.api.engine(model)

    def run(seed, use):
        torch.manual_seed(seed)
        model(torch.randn(8, 192), use).float().square().mean().backward()
        let_it_run()

    for seed in range(4):
        run(seed, "dabc")
        optimizer.step()
        optimizer.zero_grad()
    run(10, "dab")
    if fault:
        for (_, index), speculation in optimizer._early._speculations.items():
            if engine.groups[index].name.endswith("a"):
                speculation.progress = early.Progress.FAILED  # so that a is updated in place
        engine.tiers.disk.engine.inject_fault("write", 0, 1, errno.EIO)
    optimizer.step()
    let_it_run()
    if fault:
        engine.tiers.disk.engine.inject_fault("write", 0, 0, errno.EIO)
    optimizer.zero_grad()
    for _ in range(3):
        try:
            run(11, "dac")
            break
        except OSError:
            optimizer.zero_grad()
    optimizer.step()
    optimizer.zero_grad()
    return outcome(model, optimizer)


def test_a_shadow_is_not_used_again_before_its_commit_came_through(tmp_path):
    expected = branching({"params": "device", "optimizer": "device"}, fault=False)
    got = branching({"params": "host", "optimizer": "disk", "disk": tmp_path}, fault=True)
    assert [name for name in expected if not torch.equal(expected[name], got[name])] == []


def test_shadows_on_disk_make_way_for_what_is_needed(tmp_path, monkeypatch):
    """A second backward needs room for wider gradients, a second optimizer for its states."""

    def scenario(model, optimizer):
        steps(model, optimizer, 4)
        backward(model, 10)
        backward(model, 11)
        optimizer.step()
        optimizer.zero_grad()
        other = unwall.AdamW(model.parameters(), lr=1e-2)
        steps(model, other, 1)

    plan = {**on_disk(tmp_path), "grads": "disk"}
    monkeypatch.setattr(early, "CLIP_MEMORY", 1000)
    monkeypatch.setattr(early.EarlyUpdates, "after_step", lambda self, *_: self.applied.clear())
    needed = same(scenario, plan).tiers["disk"].peak_bytes
    monkeypatch.undo()
    monkeypatch.setattr(early, "CLIP_MEMORY", 2)
    stats = same(scenario, {**plan, "disk_bytes": needed + 300_000})
    assert stats.speculated.committed > 0
    assert stats.tiers["disk"].peak_bytes <= needed + 300_000


def test_shadows_that_are_being_committed_are_waited_for_when_the_host_needs_room():
    needed = []
    for budget in (None, 0):
        model, optimizer = start({**HOST, **({} if budget is None else {"host_bytes": needed[0] + 4096})})
        optimizer._early._rest_steps = 1000 if budget is None else 0
        steps(model, optimizer, 3)
        backward(model, 10)
        let_it_run()
        slow = HostUpdate(lambda: time.sleep(0.2), object())
        optimizer.step()  # its commits are queued behind that
        unwall.AdamW(model.parameters())
        slow.wait()
        needed.append(unwall.stats(model).tiers["host"].peak_bytes)
        committed = unwall.stats(model).speculated.committed
    assert committed > 0


def test_the_update_thread_does_not_wait_for_itself_when_it_is_the_one_that_needs_room():
    model, optimizer = start(HOST)
    steps(model, optimizer, 3)
    backward(model, 10)
    let_it_run()
    go_on = threading.Event()
    HostUpdate(lambda: go_on.wait(10), object())
    reclaiming = HostUpdate(optimizer._early.reclaim, object())
    optimizer.step()  # its commits come after that
    go_on.set()
    reclaiming.wait(10)
    assert unwall.stats(model).speculated.committed > 0


@pytest.mark.parametrize("forgotten", [False, True])
def test_a_model_dropped_between_backward_and_step_leaves_no_file(tmp_path, forgotten):
    model, optimizer = start(on_disk(tmp_path))
    steps(model, optimizer, 3)
    backward(model, 10)
    if forgotten:
        optimizer.zero_grad()
    del model, optimizer
    for _ in range(100):
        gc.collect()
        if not list(tmp_path.iterdir()):
            return
        time.sleep(0.02)
    raise AssertionError(f"left behind: {list(tmp_path.iterdir())}")


def test_a_folder_that_is_removed_while_training_does_no_harm(tmp_path):
    folder = tmp_path / "tier"
    folder.mkdir()

    def scenario(model, optimizer):
        steps(model, optimizer, 1)  # nothing was speculated yet
        if unwall.api.engine(model).tiers.disk is not None:
            shutil.rmtree(folder)
        steps(model, optimizer, 3, first=5)

    same(scenario, on_disk(folder))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("late", [False, True])
def test_a_wrapped_optimizer_on_the_same_parameters(dtype, late):
    """Both update the same master, one ahead of the step, the other not."""

    def scenario(model, optimizer):
        def wrapped():
            return unwall.wrap(torch.optim.SGD(model.parameters(), lr=1e-2))

        other = None if late else wrapped()
        steps(model, optimizer, 3)
        backward(model, 10)
        let_it_run()
        other = other or wrapped()
        optimizer.step()
        for seed in range(3):
            steps(model, other, 1, first=20 + seed)
            steps(model, optimizer, 1, first=30 + seed)

    same(scenario, dtype=dtype)


@pytest.mark.parametrize("clip", [None, 1e-3])
def test_an_optimizer_dropped_after_its_update_failed_leaves_a_usable_model(tmp_path, clip):
    """Without clipping, what was computed ahead is committed behind the failed update, when the optimizer is long gone."""

    def scenario(model, optimizers):
        steps(model, optimizers[0], 4)
        backward(model, 10)
        let_it_run()
        tiers = unwall.api.engine(model).tiers
        committed = unwall.stats(model).speculated.committed
        if tiers.disk is not None:
            tiers.disk.engine.inject_fault("write", 0, 10**6, errno.EIO)
        optimizers[0].step()
        let_it_run()
        optimizers.clear()
        gc.collect()
        if tiers.disk is not None:
            with pytest.raises(OSError, match="Input/output error"):
                unwall.stats(model)
            tiers.disk.engine.inject_fault("write", 0, 0, errno.EIO)
            assert (unwall.stats(model).speculated.committed > committed) == (clip is None)
        return model.state_dict()

    results = []
    for plan in ({"params": "device", "optimizer": "device"}, {"params": "host", "optimizer": "disk", "disk": tmp_path}):
        model, *optimizers = start(plan, max_grad_norm=clip)
        results.append(scenario(model, optimizers))
        assert not optimizers
    assert all(torch.equal(results[0][name], results[1][name]) for name in results[0])


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
        ({**disk, "stage": stage}, {}),
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
