"""Updates in place ahead of ``step``, with a way back: the bits of a synchronous step, whatever happens in between."""

import threading

import pytest
import torch
from busy import until
from early_tools import DEVICE, HOST, backward, outcome, same, start, steps

import unwall
from unwall.optim.journaled import FIRST_STEP
from unwall.optim.updates import HostUpdate, drain
from unwall.runtime.failures import FailureDomain

DTYPES = [torch.bfloat16, torch.float32, torch.float16]
READY = FIRST_STEP + 9
"""Steps after which updates fit into a journal, whatever the gradients of the first ones were."""
BYTES = {torch.bfloat16: 14, torch.float32: 16, torch.float16: 16}


def room(dtype=torch.bfloat16, share=1.0):
    """A host with room for the states and a journal of all of them, but for no shadow. ``share``: of the journals."""
    model, optimizer = start(HOST, dtype, speculate=False)
    steps(model, optimizer, 1)
    stats = unwall.stats(model)
    numel = sum(group.own_numel for group in unwall.api.engine(model).groups)
    assert stats.tiers["host"].live_bytes == BYTES[dtype] * numel
    return {**HOST, "host_bytes": stats.tiers["host"].live_bytes + int(share * (2.13 * numel + 20_000))}


def journaled(scenario, dtype=torch.bfloat16, **options):
    return same(scenario, room(dtype), dtype=dtype, **options)


@pytest.mark.parametrize("dtype", DTYPES)
def test_it_is_kept_where_nothing_is_clipped(dtype):
    stats = journaled(lambda model, optimizer: steps(model, optimizer, READY + 3), dtype)
    assert 0 < stats.speculated.in_place == stats.speculated.committed
    assert stats.speculated.missed == 0
    assert "used, in place" in str(stats)


@pytest.mark.parametrize("dtype", DTYPES)
def test_it_is_done_again_where_the_norm_is_clipped_now_and_then(dtype):
    def scenario(model, optimizer):
        steps(model, optimizer, READY)
        for seed in range(READY, READY + 9):
            optimizer.max_grad_norm = 1e-2 if seed % 3 == 0 else 1e6
            steps(model, optimizer, 1, first=seed)

    stats = journaled(scenario, dtype, max_grad_norm=1e6)
    assert stats.speculated.committed > 5
    assert stats.speculated.missed > 5
    assert stats.speculated.escaped > 0
    assert "escaped a journal" in str(stats)


def test_clipping_in_every_step_is_not_speculated_on():
    stats = journaled(lambda model, optimizer: steps(model, optimizer, READY + 3), max_grad_norm=1e-3)
    assert (stats.speculated.committed, stats.speculated.missed) == (0, 0)


def scaled(model, optimizer):
    """Of fp16, with losses that overflow now and then."""
    for seed in range(12):
        torch.manual_seed(seed)
        loss = model(torch.randn(16, 64)).float().square().mean() * (1e30 if seed % 4 == 3 else 1.0)
        optimizer.scale(loss).backward()
        drain()
        optimizer.step()
        optimizer.zero_grad()


def test_steps_of_a_scaled_loss_some_of_them_skipped():
    assert journaled(scaled, torch.float16).skipped_steps > 0


def test_steps_that_are_skipped_because_of_a_gradient_that_is_not_finite():
    def scenario(model, optimizer):
        steps(model, optimizer, READY)
        for seed in range(READY, READY + 4):
            backward(model, seed, scale=float("nan") if seed % 2 else 1.0)
            drain()
            optimizer.step()
            optimizer.zero_grad()

    stats = journaled(scenario, skip_nonfinite=True)
    assert stats.skipped_steps == 2
    assert stats.speculated.committed > 0


def looked(model, optimizer):
    outcome(model, optimizer)


def rate_changed(model, optimizer):
    optimizer.param_groups[0]["lr"] = 1e-3


def clipped_by_hand(model, optimizer):
    optimizer.clip_grad_norm_(1e-3)


def clipped_by_torch(model, optimizer):
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)


def gradients_changed(model, optimizer):
    for param in model.parameters():
        param.grad.mul_(0.5)


def forgotten(model, optimizer):
    optimizer.zero_grad()


def forgotten_by_the_model(model, optimizer):
    model.zero_grad()
    backward(model, 52)


def evaluated(model, optimizer):
    with torch.no_grad():
        model(torch.randn(4, 64))


def weights_written(model, optimizer):
    with torch.no_grad(), unwall.full_params(model, write=True):
        model[0][0].weight.mul_(0.5)


def another_optimizer(model, optimizer):
    other = unwall.wrap(torch.optim.SGD(model.parameters(), lr=1e-2))
    other.step()
    backward(model, 53)


def asked_for_statistics(model, optimizer):
    unwall.stats(model)


BETWEEN = [
    looked,
    rate_changed,
    clipped_by_hand,
    clipped_by_torch,
    gradients_changed,
    forgotten,
    forgotten_by_the_model,
    evaluated,
    weights_written,
    another_optimizer,
    asked_for_statistics,
]


@pytest.mark.parametrize("event", BETWEEN)
def test_whatever_happens_between_backward_and_step(event):
    ready = []

    def scenario(model, optimizer):
        steps(model, optimizer, READY)
        for seed, waits in ((50, True), (60, False)):
            backward(model, seed)
            if waits:
                drain()
            ready.append(optimizer.ahead.ready + optimizer.ahead.under_way)
            event(model, optimizer)
            optimizer.step()
            optimizer.zero_grad()
        steps(model, optimizer, 2, first=70)

    journaled(scenario)
    assert ready[2] > 3, "on the host something ran ahead"


def test_looking_at_the_model_between_backward_and_step_shows_the_old_values():
    model, optimizer = start(room())
    steps(model, optimizer, READY)
    before = outcome(model, optimizer)
    backward(model, 10)
    drain()
    assert optimizer.ahead.ready > 3
    after = outcome(model, optimizer)
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_a_group_that_was_looked_at_is_left_alone_for_a_while():
    model, optimizer = start(room())
    steps(model, optimizer, READY)
    backward(model, 10)
    drain()
    model.state_dict()
    optimizer.step()
    optimizer.zero_grad()
    backward(model, 11)
    assert optimizer.ahead.ready + optimizer.ahead.under_way == 0


def test_sixteen_bytes_per_parameter_are_enough():
    model, optimizer = start(room())
    steps(model, optimizer, READY + 1)
    stats = unwall.stats(model)
    numel = sum(group.own_numel for group in unwall.api.engine(model).groups)
    assert stats.speculated.committed > 3
    assert 15.5 * numel < stats.tiers["host"].peak_bytes < 16.5 * numel


def test_half_the_room_is_for_the_first_groups():
    stats = same(lambda model, optimizer: steps(model, optimizer, READY + 3), room(share=0.5))
    assert stats.speculated.committed > 0


def test_with_room_for_shadows_there_are_no_journals():
    model, optimizer = start({**HOST, "host_bytes": 10**8})
    steps(model, optimizer, 4)
    found = unwall.stats(model).speculated
    assert found.committed > 0  # in steps too early for a journal
    assert found.in_place == 0


def test_with_room_for_some_shadows_the_other_groups_have_journals():
    model, optimizer = start(HOST, speculate=False)
    steps(model, optimizer, 1)
    plan = {**HOST, "host_bytes": int(1.5 * unwall.stats(model).tiers["host"].live_bytes)}
    found = same(lambda model, optimizer: steps(model, optimizer, READY), plan).speculated
    assert 0 < found.in_place < found.committed


def test_journals_can_be_done_without():
    stats = same(lambda model, optimizer: steps(model, optimizer, READY), room(), speculate="shadows")
    assert stats.speculated.in_place == 0


def test_journals_make_way_for_what_is_needed():
    plan = room()

    def scenario(model, optimizer):
        steps(model, optimizer, READY)
        backward(model, 10)
        drain()
        backward(model, 11)  # needs room for the sum of gradients
        optimizer.step()
        optimizer.zero_grad()
        steps(model, optimizer, 1, first=20)

    model, optimizer = start({**HOST}, speculate=False)
    scenario(model, optimizer)
    needed = unwall.stats(model).tiers["host"].peak_bytes
    same(scenario, {**HOST, "host_bytes": max(needed, plan["host_bytes"])})


def test_a_step_that_comes_before_the_update_was_begun():
    def scenario(model, optimizer):
        steps(model, optimizer, READY)
        go_on = threading.Event()
        HostUpdate(until(go_on), FailureDomain())  # the update thread has other work
        backward(model, 10)
        go_on.set()
        optimizer.step()
        optimizer.zero_grad()
        steps(model, optimizer, 1, first=20)

    journaled(scenario)


def test_what_speculate_may_be():
    with pytest.raises(ValueError, match='speculate is True, False, "shadows" or "journal", got \'journals\''):
        start(HOST, speculate="journals")


def on_ranks(stage):
    """Names of what differs from everything on the device."""
    wrong = []
    for clip in (None, 1.2):
        results = []
        for place in ({**DEVICE, "stage": stage}, {**HOST, "stage": stage}):
            if place["optimizer"] == "host":
                model, optimizer = start(place, speculate=False)
                steps(model, optimizer, 1)
                needed = unwall.stats(model).tiers["host"].live_bytes
                place = {**place, "host_bytes": int(needed * 1.17)}
            model, optimizer = start(place, max_grad_norm=clip)
            steps(model, optimizer, READY + 8)
            results.append(outcome(model, optimizer))
        found = unwall.stats(model).speculated
        wrong += [name for name in results[0] if not torch.equal(results[0][name], results[1][name])]
        if not found.committed:
            wrong.append(f"nothing was kept with {clip}")
    return wrong


@pytest.mark.parametrize("stage", [1, 3])
def test_on_two_ranks(ranks, stage):
    assert ranks(2).run(on_ranks, stage) == [[], []]
