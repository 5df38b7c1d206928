"""Bytes, bounds and simulated steps."""

import dataclasses
import time

import pytest
import torch
from planner_tools import MACHINE, job
from torch import nn

from unwall.planner.description import from_shape
from unwall.planner.job import Workload, make_job
from unwall.planner.memory import ACTIVATIONS, SHADOWS, terms_of
from unwall.planner.outline import outline_of, skeleton
from unwall.planner.pace import COMPUTE, FETCH, UPDATE, pace_of
from unwall.planner.predict import kept_share, predict, work_of
from unwall.planner.simulation.run import Simulation
from unwall.plans import Plan
from unwall.shards.home import device_bytes_of, disk_bytes_of, host_bytes_of
from unwall.shards.working import host_working_bytes, working_bytes
from unwall.tiers.ledger import BudgetError

MACHINE_8 = dataclasses.replace(MACHINE, devices_per_node=8, collective_bytes_per_s=1e11)
PLANS = {
    "device": Plan(),
    "host": Plan(params="host", optimizer="host"),
    "optimizer on host": Plan(params="device", optimizer="host"),
    "mixed": Plan(device_bytes="1MiB"),
    "disk": Plan(params="disk", optimizer="disk", grads="disk", disk="/nowhere"),
    "states on disk": Plan(params="host", optimizer="disk", disk="/nowhere"),
    "stage 0": Plan(stage=0),
    "stage 1": Plan(stage=1),
    "stage 2, fp32": Plan(stage=2, compute_dtype=torch.float32),
    "fp16": Plan(params="host", optimizer="host", compute_dtype=torch.float16),
    "replica": Plan(replica="node", node_ranks=2, gather_dtype="int8", reduce_dtype="int4"),
    "replica on the host": Plan(params="host", optimizer="host", replica="node", node_ranks=2, reduce_dtype="int8"),
    "feedback": Plan(reduce_dtype="int4", reduce_feedback=True),
}


@pytest.mark.parametrize("ranks", [1, 4])
@pytest.mark.parametrize("name", PLANS)
def test_the_named_terms_add_up_to_what_the_engine_decides_by(name, ranks):
    found = job(PLANS[name], ranks)
    terms = terms_of(found)
    pairs = list(zip(found.sizes, found.homes, strict=True))
    device = {term: nbytes for term, nbytes in terms["device"].items() if term != ACTIVATIONS}
    assert sum(device.values()) == sum(device_bytes_of(*pair) for pair in pairs) + working_bytes(found.sizes, found.homes)
    host = sum(host_bytes_of(*pair) for pair in pairs) + host_working_bytes(found.sizes, found.homes)
    assert sum(terms["host"].values()) == host
    assert sum(terms["disk"].values()) == sum(disk_bytes_of(*pair) for pair in pairs)


@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("name", ["device", "stage 0", "stage 1", "host", "feedback"])
def test_gradients_over_a_slow_link_are_waited_for_at_every_stage(name, passes):
    slow = dataclasses.replace(MACHINE_8, collective_bytes_per_s=1e6)
    found = predict(job(PLANS[name], 8, passes=passes), slow)
    assert found.bound.limit == "collectives"
    assert found.bound.step_s <= found.step_s * 1.001


def test_states_on_the_host_move_parameters_twice_and_gradients_once():
    found = job(Plan(params="host", optimizer="host", device_bytes="200KiB"))
    params = sum(size.flat_bytes for size in found.sizes)
    assert kept_share(found) == (200 << 10) / params
    work = work_of(found)
    assert work.host_to_device_bytes == pytest.approx(2 * params - (200 << 10))
    assert work.device_to_host_bytes == params
    assert work.host_memory_bytes == 26 * sum(size.own_numel for size in found.sizes)
    assert work_of(job(Plan(params="host", optimizer="host"))).host_to_device_bytes == params  # all stay until the step


@pytest.mark.parametrize(("stage", "volume"), [(0, 2), (1, 2), (2, 2), (3, 3)])
def test_collectives_move_what_zero_says(stage, volume):
    found = job(Plan(stage=stage), ranks=4)
    if stage == 3:  # no room to keep anything
        found = dataclasses.replace(found, plan=Plan(stage=3, device_bytes=1))
    params = sum(size.flat_bytes for size in found.sizes)
    assert work_of(found).collective_bytes == pytest.approx(volume * params * 3 / 4)


def test_resident_step_is_compute_and_the_device_s_update():
    found = job(Plan(), batch=8, seq=128)
    predicted = predict(found, MACHINE)
    flops = found.outline.description.flops(8, 128, recompute=True)
    assert predicted.step_s == pytest.approx(flops / 5e11, rel=0.1)
    assert predicted.step_s > flops / 5e11
    assert predicted.bound.limit == "compute"
    assert predicted.bound.step_s == pytest.approx(flops / 1e12)
    assert predicted.tokens_per_s == pytest.approx(8 * 128 / predicted.step_s)
    assert predicted.mfu == pytest.approx(found.outline.description.flops(8, 128) / predicted.step_s / 1e12)
    assert predicted.disk_days is None


def test_a_slow_link_sets_the_step_and_more_budget_halves_it():
    slow = dataclasses.replace(MACHINE, host_to_device_bytes_per_s=1e6)
    params = sum(size.flat_bytes for size in job(Plan()).sizes)
    tight = predict(job(Plan(params="host", optimizer="host", device_bytes="200KiB")), slow)
    roomy = predict(job(Plan(params="host", optimizer="host")), slow)
    assert tight.bound.limit == "host to device"
    assert tight.bound.step_s <= tight.step_s < 2.3 * params / 1e6  # what forward used last may stay for backward
    assert roomy.step_s == pytest.approx(params / 1e6, rel=0.3)


def test_updates_overlap_the_next_forward():
    """Compute and updates of the same length: the step is shorter than both in a row, and longer than either."""
    found = job(Plan(params="host", optimizer="host"), batch=4, seq=128)
    busy = Simulation(found, pace_of(MACHINE, torch.bfloat16)).run().busy_s
    slower = dataclasses.replace(MACHINE, host_memory_bytes_per_s=1e10 * busy[UPDATE] / busy[COMPUTE])
    step = Simulation(found, pace_of(slower, torch.bfloat16)).run()
    assert step.busy_s[UPDATE] == pytest.approx(step.busy_s[COMPUTE], rel=0.05)
    assert 1.05 * step.busy_s[COMPUTE] < step.step_s < 1.9 * step.busy_s[COMPUTE]
    ahead = job(Plan(params="host", optimizer="host"), batch=4, seq=128, clip=False)
    assert Simulation(ahead, pace_of(slower, torch.bfloat16)).run().step_s < 0.9 * step.step_s
    promised = job(Plan(params="host", optimizer="host"), batch=4, seq=128, clip=False, update_in_backward=True)
    assert not promised.shadowed
    assert Simulation(promised, pace_of(slower, torch.bfloat16)).run().step_s < 0.9 * step.step_s


def test_second_places_take_what_the_host_leaves():
    plan = Plan(params="host", optimizer="host")
    held = sum(terms_of(job(plan))["host"].values())
    none, some, most = (job(plan, host=host, clip=False, journal=False) for host in (held, int(1.5 * held), None))
    assert none.shadowed == ()
    assert some.shadowed == tuple(range(2, 2 + len(some.shadowed)))  # the first ones, but for two that land too late
    assert 0 < len(some.shadowed) < len(most.shadowed) == len(most.sizes) - 2
    assert sum(terms_of(some)["host"].values()) <= 1.5 * held
    states = [size.shard_bytes + size.state_bytes for size in most.sizes]
    assert terms_of(most)["host"][SHADOWS] == sum(states[2:])


def test_journals_take_less_of_what_the_host_leaves():
    plan = Plan(params="host", optimizer="host")
    held = sum(terms_of(job(plan))["host"].values())
    found = job(plan, host=int(1.2 * held), clip=False)
    assert found.shadowed + found.journaled == tuple(range(2, len(found.sizes)))
    assert found.journaled
    assert sum(terms_of(found)["host"].values()) <= 1.2 * held
    assert not job(plan, host=int(1.2 * held), clip=False, journal=False).journaled


def test_on_the_host_s_own_cores_everything_adds_up():
    cores = dataclasses.replace(MACHINE, is_host=True, host_cores=2)
    step = Simulation(job(Plan(params="host", optimizer="host"), batch=4, seq=128), pace_of(cores, torch.bfloat16)).run()
    together = step.busy_s[COMPUTE] + step.busy_s[UPDATE]
    assert together < step.step_s < together + step.busy_s[FETCH] + step.busy_s["device to host"]


def test_passes_add_up_and_are_not_all_simulated():
    one, many = (predict(job(Plan(params="host", optimizer="host"), passes=passes), MACHINE) for passes in (1, 12))
    assert 6 * one.step_s < many.step_s < 14 * one.step_s
    assert many.busy_s[COMPUTE] == pytest.approx(12 * one.busy_s[COMPUTE], rel=0.1)


def test_a_disk_wears_out():
    found = job(Plan(params="disk", optimizer="disk", grads="disk", disk="/nowhere"))
    predicted = predict(found, MACHINE)
    states = sum(size.shard_bytes + size.state_bytes + size.grad_bytes for size in found.sizes)
    assert predicted.work.disk_write_bytes == states
    assert predicted.disk_written_bytes_per_day == pytest.approx(states / predicted.step_s * 86400)
    assert predicted.disk_days == pytest.approx(1e15 / predicted.disk_written_bytes_per_day)
    assert predicted.step_s >= predicted.bound.step_s


def test_a_budget_is_kept_in_the_simulation():
    for budget in ("700KiB", "1MiB", "2MiB"):
        plan = Plan(device_bytes=budget)
        predicted = predict(job(plan), MACHINE)
        assert predicted.peak_bytes["device"] <= plan.budget_device_bytes


def test_no_room_for_what_is_in_use_at_once():
    found = job(Plan(params="host", optimizer="host"))
    tight = dataclasses.replace(found, plan=Plan(params="host", optimizer="host", device_bytes="4KiB"))
    with pytest.raises(BudgetError, match="are in use"):
        predict(tight, MACHINE)


def test_workload_is_checked():
    for field, value in (("batch", 0), ("seq", -5), ("passes", 1.5), ("activations", "burn"), ("update_in_backward", True)):
        with pytest.raises(ValueError, match=field):
            job(Plan(), **{field: value})


def test_the_bound_holds_for_every_plan():
    for ranks, machine in ((1, MACHINE), (4, MACHINE_8)):
        for plan in PLANS.values():
            if plan.compute_dtype is not torch.float16:
                predicted = predict(job(plan, ranks, batch=2, seq=64), machine)
                assert predicted.step_s >= 0.999 * predicted.bound.step_s, plan


@pytest.mark.clock
def test_70b_is_predicted_in_seconds():
    begin = time.perf_counter()
    predict(job(Plan(device_bytes="40GiB"), 8, skeleton(from_shape("80x8192")), batch=4, seq=2048), MACHINE_8)
    assert time.perf_counter() - begin < 10


def test_a_layer_that_does_not_fit_whole_is_predicted_in_tiles():
    model = nn.Sequential(nn.Linear(1024, 1024, device="meta"), nn.Tanh(), nn.Linear(1024, 1024, device="meta"))
    plan = Plan(device_bytes=1 << 20, params="host", optimizer="host", compute_dtype=torch.float32)
    found = make_job(outline_of(model), plan, 1, Workload(batch=1, seq=8), plan.budget_device_bytes, None)
    tiles = [unit for unit, _ in found.planned if unit.is_part]
    assert len(tiles) >= 2 * 8
    assert sum(unit.nbytes for unit in tiles) == 2 * 4 * 1024 * 1024
    read = [index for stretch in found.stretches for index in stretch.groups]
    assert set(read) == set(range(len(found.planned)))
    assert sum(stretch.active_numel for stretch in found.stretches) == pytest.approx(2 * 1024 * 1024)


def test_what_travels_packed_takes_less_of_a_slow_link():
    """Half the bytes of bf16, a little more than half of the step, because packing takes its time."""
    machine = dataclasses.replace(MACHINE, nodes=2, network_bytes_per_s=1e7)
    plain, packed = (
        predict(job(Plan(**fields), ranks=2, seq=4, clip=False), machine)
        for fields in ({}, {"gather_dtype": "int8", "reduce_dtype": "int8"})
    )
    assert packed.work.collective_bytes / plain.work.collective_bytes == pytest.approx(0.508, abs=0.001)
    assert packed.bound.step_s / plain.bound.step_s == pytest.approx(0.508, abs=0.001)
    assert 0.5 < packed.step_s / plain.step_s < 0.6
