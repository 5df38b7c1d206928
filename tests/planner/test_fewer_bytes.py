"""Lean states and gradients that are not kept, where the planner says that they would help."""

import dataclasses
import re

import pytest
import torch
from planner_tools import MACHINE, decoder

from unwall.planner.choose import DoesNotFitError, choose
from unwall.planner.fewer_bytes import LEAN, TRANSIENT
from unwall.planner.job import Workload, make_job
from unwall.planner.predict import predict

LARGE = {"width": 1024, "layers": 48, "vocab": 1024}


def chosen(machine=MACHINE, **options):
    return choose(decoder(**LARGE), machine, batch=1, seq=64, **{"directory": "/fast", **options})


def told(found):
    """Seconds by what the advice says would make a step faster."""
    lines = [re.fullmatch(r"with (.*) a step would take (\S+) s", line) for line in found.advice]
    return {line[1]: float(line[2]) for line in lines if line}


def test_what_is_promised_is_what_following_it_gives():
    found = chosen()
    assert found.prediction.tier_bytes("disk") > 0
    hints = told(found)
    assert set(hints) == {LEAN, TRANSIENT}
    lean = chosen(states="lean")
    assert lean.prediction.step_s <= hints[LEAN] * 1.02  # that search may find a better placement yet
    plan = dataclasses.replace(found.to_plan(), grads="transient")
    load = dataclasses.replace(found.workload, clip=False, update_in_backward=True)
    job = make_job(decoder(**LARGE), plan, 1, load, plan.budget_device_bytes, plan.budget_host_bytes)
    assert predict(job, MACHINE).step_s == pytest.approx(hints[TRANSIENT], rel=0.02)
    assert hints[TRANSIENT] * 1.1 <= found.prediction.step_s


def test_nothing_is_said_where_it_would_not_help():
    assert told(chosen(dataclasses.replace(MACHINE, host_bytes=32 << 30))) == {}  # nothing is on disk
    assert LEAN not in told(chosen(states="lean"))
    assert LEAN not in told(chosen(compute_dtype=torch.float32))
    halves = dataclasses.replace(MACHINE, matmul_flops_per_s={"float16": 1e12}, block_flops_per_s={"float16": 5e11})
    assert told(chosen(halves, compute_dtype=torch.float16)) == {}  # states are exact, and a loss scale needs all gradients
    with pytest.raises(DoesNotFitError, match="What would do: "):
        chosen(dataclasses.replace(halves, host_bytes=2 << 30), compute_dtype=torch.float16, directory=None)
    ranks = dataclasses.replace(MACHINE, devices_per_node=2, collective_bytes_per_s=1e9)
    assert TRANSIENT not in told(choose(decoder(**LARGE), ranks, batch=2, seq=64, directory="/fast", host_bytes=1 << 30))


def test_a_refusal_names_what_would_fit():
    outline = decoder(**LARGE)
    params = outline.description.params
    for per_param, helps in ((12.8, {LEAN, TRANSIENT}), (8, {LEAN}), (3, set())):
        machine = dataclasses.replace(MACHINE, device_bytes=300 << 20, host_bytes=int(params * per_param / 0.85))
        with pytest.raises(DoesNotFitError) as refusal:
            choose(outline, machine, batch=1, seq=64)
        assert {words for words in (LEAN, TRANSIENT) if words in str(refusal.value)} == helps


def test_workloads_of_several_passes_keep_their_gradients():
    """A sum needs them."""
    machine = dataclasses.replace(MACHINE, device_bytes=400 << 20)
    found = choose(decoder(**LARGE), machine, batch=16, seq=1024, directory="/fast", kept=("keep",))
    assert found.workload.passes > 1
    assert TRANSIENT not in told(found)
    assert isinstance(found.workload, Workload)
