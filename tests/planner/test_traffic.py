"""What comes from other ranks, inside a node and between nodes: predicted, simulated, and counted in a run."""

import dataclasses

import pytest
from offload import DEVICE, HOST, Setup, build, start, step
from planner_tools import MACHINE, decoder, job

import unwall
from unwall.planner.choose import choose
from unwall.planner.job import Workload, make_job
from unwall.planner.outline import outline_of
from unwall.planner.pace import NEAR, pace_of
from unwall.planner.predict import predict, work_of
from unwall.planner.simulation.run import Simulation
from unwall.planner.traffic import of_near_gather, with_nodes
from unwall.plans import Plan
from unwall.shards.home import device_bytes_of
from unwall.shards.working import working_bytes

SETUP = Setup(steps=2, blocks=4)
INT8 = {"gather_dtype": "int8", "reduce_dtype": "int8"}
NODES = {"node_ranks": 2, "activations": "keep"}
CASES = {
    "nodes are not known": {**DEVICE, **INT8, "activations": "keep"},
    "two hops": {**DEVICE, **INT8, **NODES},
    "two hops and a second copy": {**DEVICE, **INT8, **NODES, "replica": "node"},
    "a second copy on the host": {**HOST, **NODES, "replica": "node"},
    "feedback takes one hop": {**HOST, **NODES, "reduce_dtype": "int4", "reduce_feedback": True},
    "stage 0": {**DEVICE, **NODES, "reduce_dtype": "int4", "stage": 0},
}
CLUSTER = dataclasses.replace(MACHINE, nodes=2, devices_per_node=2, collective_bytes_per_s=1e10, network_bytes_per_s=1e8)


def counted(cases):
    """Bytes from other ranks, and from other nodes, in a step in which backward finds nothing of forward on the device."""
    found = []
    for fields in cases:
        model, optimizer = start(SETUP, fields, "unused")
        model.register_forward_hook(lambda model, *_: unwall.api.engine(model).executor.drop_cache())
        for number in range(SETUP.steps):
            unwall.stats(model).reset()
            step(model, optimizer, SETUP, number)
        stats = unwall.stats(model).collectives.values()
        found.append((sum(kind.bytes for kind in stats), sum(kind.far_bytes for kind in stats)))
    return found


def planned(fields):
    """The same case for the planner, with room for nothing beside what is in use."""
    return planned_with(Plan(**fields))


def planned_with(plan):
    outline, load = outline_of(build(blocks=SETUP.blocks)), Workload(batch=8, seq=1, clip=False)
    return with_room(make_job(outline, plan, 4, load, None, None), 1)


def with_room(found, device_bytes):
    return dataclasses.replace(found, plan=dataclasses.replace(found.plan, device_bytes=device_bytes))


def test_the_planner_counts_what_a_run_on_two_nodes_counts(ranks):
    every = ranks(4).run(counted, list(CASES.values()))
    for (name, fields), *found in zip(CASES.items(), *every, strict=True):
        work = work_of(planned(fields))
        everyone = work.collective_bytes - work.near_bytes - work.across_bytes
        far = work.across_bytes + everyone * 2 / 3 if "node_ranks" in fields else 0
        for nbytes, far_bytes in found:
            assert work.collective_bytes == pytest.approx(nbytes, rel=1e-3), name
            assert far == pytest.approx(far_bytes, rel=1e-3), name


@pytest.mark.parametrize("name", CASES)
def test_a_simulated_step_moves_what_the_planner_counts(name):
    roomy = with_room(planned(CASES[name]), None)
    pace = pace_of(CLUSTER, roomy.plan.compute_dtype)
    work, moved = work_of(roomy), Simulation(roomy, pace).run().traffic
    assert (moved.total, moved.near, moved.across) == pytest.approx((work.collective_bytes, work.near_bytes, work.across_bytes))


@pytest.mark.parametrize("name", ["two hops and a second copy", "a second copy on the host"])
def test_where_room_is_short_further_gathers_stay_inside_the_node(name):
    roomy = job(Plan(**CASES[name]), 4)
    held = sum(device_bytes_of(*pair) for pair in zip(roomy.sizes, roomy.homes, strict=True))
    least = held + working_bytes(roomy.sizes, roomy.homes)
    pace = pace_of(CLUSTER, roomy.plan.compute_dtype)
    full, short = (Simulation(found, pace).run() for found in (roomy, with_room(roomy, least)))
    assert short.device_peak_bytes <= least
    assert short.gathers > full.gathers == len(roomy.sizes)
    near = sum(of_near_gather(size, roomy.plan, 4).total for size in roomy.sizes) / len(roomy.sizes)
    assert short.traffic.near - full.traffic.near == pytest.approx((short.gathers - full.gathers) * near, rel=0.3)
    assert short.traffic.everyone == full.traffic.everyone
    assert short.traffic.across == full.traffic.across


def test_the_planner_knows_the_nodes_of_its_machine():
    """As shard asks the launcher: where a second copy inside the node is wanted, and nobody has said what a node is."""
    wanted = Plan(**{**CASES["a second copy on the host"], "node_ranks": None})
    filled = with_nodes(wanted, CLUSTER, 4)
    assert filled == Plan(**CASES["a second copy on the host"])
    assert work_of(planned_with(filled)).near_bytes > 0 == work_of(planned_with(wanted)).near_bytes
    for plan, ranks in ((wanted, 1), (Plan(**INT8), 4), (dataclasses.replace(wanted, node_ranks=3), 4)):
        assert with_nodes(plan, CLUSTER, ranks) is plan


def test_the_hop_inside_the_node_takes_its_time():
    two_hops, fast = planned(CASES["two hops"]), dataclasses.replace(CLUSTER, collective_bytes_per_s=1e12)
    slow = dataclasses.replace(CLUSTER, collective_bytes_per_s=1e6)
    quick, late = (predict(with_room(two_hops, None), machine) for machine in (fast, slow))
    assert late.busy_s[NEAR] == pytest.approx(late.work.near_bytes / 1e6)
    assert late.bound.limit == "collectives in a node"
    assert late.step_s > quick.step_s + 0.5 * late.busy_s[NEAR]


def test_the_planner_proposes_a_second_copy_where_it_pays():
    """Parameters that do not stay from forward to backward, behind a slow network. Over a fast one nothing is said."""
    found = {}
    for rate in (1e8, 1e10):
        machine = dataclasses.replace(CLUSTER, network_bytes_per_s=rate)
        found[rate] = choose(decoder(), machine, ranks=4, batch=4, seq=128, device_bytes=600_000)
    assert found[1e8].replica is None
    assert "with replica='node', node_ranks=2 a step would take" in found[1e8].advice[-1]
    assert not any("replica" in line for line in found[1e10].advice)
