"""The simulation drives the engine's executor: what it fetches and drops is what the engine fetches and drops."""

import pytest
import torch
from planner_tools import MACHINE, Decoder
from torch.utils.checkpoint import checkpoint

import unwall
from unwall.api import engine
from unwall.planner.job import Workload, make_job
from unwall.planner.outline import outline_of
from unwall.planner.pace import pace_of
from unwall.planner.simulation.run import STEPS, Simulation
from unwall.plans import Plan

HOST = {"params": "host", "optimizer": "host"}


class Recomputed(Decoder):
    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.head(x)


def listen(groups, events):
    """Notes each fetch and drop of these groups, in order."""
    for index, group in enumerate(groups):
        for name in ("begin_gather", "drop"):
            method = getattr(group, name)

            def noted(event=(name, index), method=method):
                events.append(event)
                method()

            setattr(group, name, noted)


def simulated(model, plan, workload):
    job = make_job(outline_of(model), plan, 1, workload, plan.budget_device_bytes, plan.budget_host_bytes)
    simulation, events = Simulation(job, pace_of(MACHINE, torch.bfloat16)), []
    listen(simulation.groups, events)
    simulation.run()
    return events


def trained(model, plan, workload):
    unwall.shard(model, plan)
    optimizer, events = unwall.AdamW(model.parameters(), max_grad_norm=1e-3), []
    for step in range(1 + STEPS):
        if step == 1:  # in the first one the order is learned
            listen(engine(model).groups, events)
        for _ in range(workload.passes):
            model(torch.arange(8)[None]).float().square().sum().backward()
        optimizer.step()
        engine(model).finish()  # a group under update is not fetched ahead: what is fetched must not depend on the machine
    return events


@pytest.mark.parametrize(
    ("fields", "passes", "recompute"),
    [
        ({}, 1, False),
        (HOST, 1, False),
        (HOST, 2, True),
        (HOST | {"device_bytes": "1200KiB"}, 1, False),
        (HOST | {"device_bytes": "1200KiB"}, 1, True),
        (HOST | {"device_bytes": "2MiB"}, 3, False),
        ({"device_bytes": "4MiB"}, 1, True),
    ],
    ids=str,
)
def test_the_same_fetches_and_drops_in_the_same_order(fields, passes, recompute):
    torch.manual_seed(0)
    plan, kind = Plan(activations="keep", **fields), Recomputed if recompute else Decoder
    model = kind(width=128, layers=4, vocab=512)
    workload = Workload(batch=1, seq=8, passes=passes, activations="recompute" if recompute else "keep")
    expected = simulated(model, plan, workload)
    assert trained(model, plan, workload) == expected
    assert bool(expected) == bool(fields)
