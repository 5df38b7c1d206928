"""Updates that run ahead of ``step``: always the bits of a synchronous step, whatever happens between backward and step."""

import threading

import pytest
import torch
from busy import until
from early_tools import DEVICE, HOST, backward, on_disk, outcome, same, start, steps

import unwall
from unwall.optim.early import Ahead
from unwall.optim.policy import CLIP_MEMORY
from unwall.optim.updates import HostUpdate, drain
from unwall.runtime.failures import FailureDomain

QUIET = CLIP_MEMORY + 2
"""Steps after which a loop that could clip, but does not, is speculated on."""


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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
@pytest.mark.parametrize("clip", [None, 1e6])
def test_a_speculated_update_that_is_committed(place, dtype, clip):
    stats = same(
        lambda model, optimizer: steps(model, optimizer, 7 if clip is None else QUIET), place, dtype=dtype, max_grad_norm=clip
    )
    assert stats.speculated.committed > 0
    assert stats.speculated.missed == 0


def test_clipping_that_becomes_active_redoes_the_update_and_then_pauses(place):
    missed = []

    def scenario(model, optimizer):
        steps(model, optimizer, QUIET)
        for seed in range(QUIET, QUIET + 8):
            steps(model, optimizer, 1, first=seed, scale=1e4)
            missed.append(unwall.stats(model).speculated.missed)

    stats = same(scenario, place, max_grad_norm=1e3)
    assert stats.speculated.committed > 0
    pause = 5 if place is HOST else 1  # a drive is not written to in vain more than once
    assert 0 < missed[8] <= missed[7 + pause] == missed[-1]


def test_in_memory_a_step_that_clips_now_and_then_is_no_reason_to_pause():
    committed = []

    def scenario(model, optimizer):
        steps(model, optimizer, QUIET)
        for seed in range(QUIET, QUIET + 3):
            steps(model, optimizer, 1, first=seed, scale=1e4 if seed == QUIET else 1.0)
            committed.append(unwall.stats(model).speculated.committed)

    stats = same(scenario, max_grad_norm=1e3)
    assert stats.speculated.missed > 0
    assert committed[3] < committed[4] < committed[5]


def test_clipping_in_every_step_is_never_speculated_on():
    stats = same(lambda model, optimizer: steps(model, optimizer, 5), max_grad_norm=1e-3)
    assert (stats.speculated.committed, stats.speculated.missed) == (0, 0)


def test_without_speculation_nothing_runs_ahead():
    def scenario(model, optimizer):
        steps(model, optimizer, 3)
        backward(model, 10)
        drain()
        assert optimizer.ahead == Ahead(under_way=0, ready=0, failed=0)
        optimizer.step()

    stats = same(scenario, speculate=False)
    assert (stats.speculated.committed, stats.speculated.missed) == (0, 0)


def test_what_runs_ahead_can_be_looked_at():
    model, optimizer = start(HOST)
    steps(model, optimizer, 3)
    nothing = Ahead(under_way=0, ready=0, failed=0)
    assert optimizer.ahead == nothing
    go_on = threading.Event()
    HostUpdate(until(go_on), FailureDomain())  # the update thread has other work
    backward(model, 10)
    begun = optimizer.ahead
    assert begun.under_way > 3
    assert (begun.ready, begun.failed) == (0, 0)
    go_on.set()
    drain()
    assert optimizer.ahead == Ahead(under_way=0, ready=begun.under_way, failed=0)
    before = unwall.stats(model).speculated.committed
    optimizer.step()
    assert optimizer.ahead == nothing
    assert unwall.stats(model).speculated.committed == before + begun.under_way


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


def test_of_the_gradients_that_wait_the_newest_is_used_first():
    """It is the one that the next forward needs first."""
    model, optimizer = start(HOST)
    steps(model, optimizer, 3)
    engine = unwall.api.engine(model)
    go_on = threading.Event()
    with unwall.profile(model) as profile:
        HostUpdate(until(go_on), FailureDomain())  # the update thread has other work
        backward(model, 10)
        for gradient in engine.gradients:
            if gradient.landing is not None:
                gradient.landing.wait()
        go_on.set()
        drain()
    order = [span.label for span in profile.spans if span.lane == "update"]  # one span for each group, by their start
    assert len(order) > 3
    in_the_model = [f"{group.name}, ahead" for group in engine.groups]
    assert order == sorted(order, key=in_the_model.index)


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
        drain()
        other = other or wrapped()
        optimizer.step()
        for seed in range(3):
            steps(model, other, 1, first=20 + seed)
            steps(model, optimizer, 1, first=30 + seed)

    same(scenario, dtype=dtype)


def on_ranks(stage, folder):
    """Each rank's own outcome on the host against everything on the device: names of what differs."""
    wrong = []
    disk = on_disk(folder)
    cases = [
        ({**HOST, "stage": stage}, {}),
        ({**HOST, "stage": stage}, {"max_grad_norm": 1e6}),
        ({**HOST, "stage": stage}, {"update_in_backward": True}),
        ({**disk, "stage": stage}, {"update_in_backward": True}),
        ({**disk, "stage": stage}, {}),
    ]
    for plan, options in cases:
        results = []
        for place in ({**DEVICE, "stage": stage}, plan):
            model, optimizer = start(place, **(options if place is plan else {}))
            steps(model, optimizer, QUIET if "max_grad_norm" in options else 5)
            results.append(outcome(model, optimizer))
            stats = unwall.stats(model)
        wrong += [f"{options} {name}" for name in results[0] if not torch.equal(results[0][name], results[1][name])]
        if not stats.speculated.committed:
            wrong.append(f"{options}: nothing was updated ahead")
    return wrong


@pytest.mark.parametrize("stage", [1, 3])
def test_updates_ahead_on_two_ranks(ranks, stage, tmp_path):
    assert ranks(2).run(on_ranks, stage, str(tmp_path)) == [[], []]
