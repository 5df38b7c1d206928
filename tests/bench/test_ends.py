"""The published ends by the planner's search, and how 1T scales."""

import pytest
import torch
from bench.paper import LARGEST_PARAMS, Largest

from bench import ends
from unwall.planner.description import from_shape
from unwall.planner.hardware import load
from unwall.planner.job import Workload, make_job
from unwall.planner.outline import skeleton
from unwall.planner.predict import predict
from unwall.plans import Plan

# What `ends.largest` finds for each system (bench/paper_tables.py runs the search; it takes a minute).
FOUND = {
    "plain DP": Largest(44, 1792),
    "ZeRO-Offload": Largest(74, 4096),
    "ZeRO-3": Largest(48, 6656),
    "Infinity, host": Largest(91, 8448),
    "Infinity, disk": Largest(342, 19456),
}
WITHIN_A_QUARTER = ("plain DP", "ZeRO-Offload", "Infinity, host")


@pytest.mark.parametrize("system", ends.SYSTEMS)
def test_the_edge_of_what_fits_one_dgx2(system):
    machine, found = load("dgx-2"), FOUND[system]
    assert ends.fits(system, found.layers, found.hidden, machine)
    assert not ends.fits(system, found.layers + 1, found.hidden, machine)
    ratio = found.params / LARGEST_PARAMS[system]
    assert (0.75 <= ratio <= 1.25) == (system in WITHIN_A_QUARTER), ratio


def test_zero_3_with_the_samples_of_figure_2a():
    """With two samples per device it is within a quarter of what was published, and 32T do not fit 32 nodes."""
    machine, found = load("dgx-2"), Largest(46, 6656)
    assert ends.fits("ZeRO-3", found.layers, found.hidden, machine, batch=2)
    assert not ends.fits("ZeRO-3", found.layers + 1, found.hidden, machine, batch=2)
    assert found.params / LARGEST_PARAMS["ZeRO-3"] < 1.25
    assert not ends.fits("Infinity, disk", 398, 81920, machine.with_nodes(32), tiles=9, batch=2)


def test_zero_3_with_the_vocabulary_of_gpt_2():
    """Blocks alone are counted, as in the published sizes: it is within a quarter."""
    machine, found, vocab = load("dgx-2"), Largest(124, 4096), ends.GPT2_VOCAB
    assert ends.fits("ZeRO-3", found.layers, found.hidden, machine, vocab=vocab)
    assert not ends.fits("ZeRO-3", found.layers + 1, found.hidden, machine, vocab=vocab)
    assert found.params / LARGEST_PARAMS["ZeRO-3"] < 1.25


def test_the_search_finds_the_edge_of_the_smallest():
    assert ends.largest("plain DP", load("dgx-2")) == FOUND["plain DP"]


def test_32t_fit_32_nodes_with_tiles():
    cluster = load("dgx-2").with_nodes(32)
    assert Largest(398, 81920).params > 32e12
    assert ends.fits("Infinity, disk", 398, 81920, cluster, tiles=9)
    assert not ends.fits("Infinity, disk", 398, 81920, cluster)
    assert not ends.fits("Infinity, disk", 398, 81920, load("dgx-2").with_nodes(16), tiles=9)


def test_1t_scales_better_than_linearly_from_64_to_512():
    """With the same placement on both; docs/scaling.svg has the planner's own choice for each size."""
    outline = skeleton(from_shape(ends.SCALING_SHAPE))
    plan = Plan(params="host", optimizer="disk", disk="/fast", compute_dtype=torch.float16, device_bytes="24GiB")
    load_of_each = Workload(batch=ends.SCALING_BATCH, seq=1024, activations="host")
    steps = {}
    for nodes in (4, 32):
        hardware = load("dgx-2").with_nodes(nodes)
        job = make_job(outline, plan, hardware.devices, load_of_each, plan.budget_device_bytes, None)
        steps[hardware.devices] = predict(job, hardware).step_s
    assert steps[512] < 0.995 * steps[64]
