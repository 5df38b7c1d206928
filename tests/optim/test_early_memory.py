"""The memory of updates ahead of ``step``: shadows take what is spare, and give it back when it is needed."""

import threading
import traceback
import weakref

import torch
from busy import until
from early_tools import HOST, backward, build, on_disk, same, start, steps
from offload import shard_near

import unwall
from unwall.optim.shadows import DISK_AHEAD, Shadows
from unwall.optim.updates import HostUpdate, drain
from unwall.runtime.failures import FailureDomain
from unwall.schedule.executor import REDUCES_IN_FLIGHT


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


def test_on_disk_few_updates_are_ahead_at_once(tmp_path):
    model, optimizer = start(on_disk(tmp_path))
    steps(model, optimizer, 3)
    go_on = threading.Event()
    HostUpdate(until(go_on), FailureDomain())  # the update thread has other work
    backward(model, 10)
    ahead = optimizer.ahead
    go_on.set()
    assert ahead.under_way == DISK_AHEAD


def test_shadows_on_disk_make_way_for_what_is_needed(tmp_path):
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
    needed = same(scenario, plan, speculate=False).tiers["disk"].peak_bytes
    stats = same(scenario, {**plan, "disk_bytes": needed + 300_000})
    assert stats.speculated.committed > 0
    assert stats.tiers["disk"].peak_bytes <= needed + 300_000


class Asked:
    """Gives nothing back, but knows that it was asked to."""

    def __init__(self, ledger):
        self.happened = threading.Event()
        ledger._reclaimers.insert(0, weakref.WeakMethod(self.reclaim))  # asked before the others

    def reclaim(self):
        self.happened.set()


def test_shadows_that_are_being_committed_are_waited_for_when_the_host_needs_room():
    model, optimizer = start(HOST, speculate=False)
    steps(model, optimizer, 3)
    unwall.AdamW(model.parameters())
    needed = unwall.stats(model).tiers["host"].peak_bytes

    model, optimizer = start({**HOST, "host_bytes": needed + 4096})
    asked = Asked(unwall.api.engine(model).tiers.host.ledger)
    steps(model, optimizer, 3)
    backward(model, 10)
    drain()
    assert optimizer.ahead.ready > 0
    HostUpdate(until(asked.happened), FailureDomain())
    optimizer.step()  # its commits are queued behind that
    assert not asked.happened.is_set()
    unwall.AdamW(model.parameters())
    assert asked.happened.is_set()
    stats = unwall.stats(model)
    assert stats.speculated.committed > 0
    assert stats.tiers["host"].peak_bytes <= needed + 4096


def test_the_update_thread_does_not_wait_for_itself_when_it_is_the_one_that_needs_room():
    model, optimizer = start(HOST)
    steps(model, optimizer, 3)
    backward(model, 10)
    drain()
    go_on = threading.Event()
    HostUpdate(until(go_on), FailureDomain())

    def reclaim():
        unwall.api.engine(model).tiers.host.ledger.reclaim()

    reclaiming = HostUpdate(reclaim, FailureDomain())
    optimizer.step()  # its commits come after that
    go_on.set()
    reclaiming.wait(200)
    assert unwall.stats(model).speculated.committed > 0


class Told:
    """An optimizer as far as the engine knows it: notes each gradient that it is told of, and who was at work then."""

    def __init__(self, engine):
        self.groups, self.callers = [], set()
        engine.audience.listen(self.landed, None)

    def landed(self, engine, index):
        self.groups.append(index)
        self.callers |= {frame.name for frame in traceback.extract_stack()}


def test_gradients_are_handed_out_while_backward_runs_but_not_while_room_is_made():
    """Whoever is told may wait for an update, and a parameter that needs room should not wait with it."""
    model = build()
    shard_near(model, **HOST, compute_dtype=torch.bfloat16, device_bytes=1)
    engine = unwall.api.engine(model)
    told = Told(engine)
    backward(model, 0)
    count = len(engine.groups)
    assert len(told.groups) >= count - REDUCES_IN_FLIGHT
    assert told.groups == sorted(told.groups, reverse=True)  # each of them once, in the order of backward
    assert "arrived" in told.callers
    assert not {"make_room", "finish_reduces"} & told.callers


class User:
    """Has a shadow until it is settled."""

    settled = False

    def stop(self):
        self.settled = True


def test_a_shadow_that_was_taken_is_not_given_back_before_its_user_is_settled():
    model, _ = start(HOST)
    engine = unwall.api.engine(model)
    group, ledger = engine.groups[0], engine.tiers.host.ledger
    stores = {"param": group.param, **group.states}
    before, shadows, user = ledger.live_bytes, Shadows(), User()
    shadow = shadows.of_group(engine, group, stores)
    with_it = ledger.live_bytes
    assert with_it > before
    for wait in (False, True):  # by another thread, between taking and lending it
        other = threading.Thread(target=shadows.reclaim, args=(wait,))
        other.start()
        other.join()
        assert ledger.live_bytes == with_it
    shadow.lend(user)
    shadows.reclaim(wait=False)
    assert ledger.live_bytes == with_it
    assert shadows.of_group(engine, group, stores) is None
    shadows.reclaim(wait=True)
    assert ledger.live_bytes == before
    taken = shadows.of_group(engine, group, stores)
    assert taken is not shadow
    taken.lend(user)  # it is settled
    assert shadows.of_group(engine, group, stores) is taken
