"""The formulas against every published number, and the bound of a step."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unwall.planner import formulas, paper
from unwall.planner.formulas import Ceilings, Work, lower_bound
from unwall.planner.hardware import load

# Printed without decimals, and cut off instead of rounded.
TRUNCATED = {
    ("64", "1T stage 1"), ("64", "1T stage 2"), ("256", "1T stage 1"), ("256", "1T stage 2"),
    ("1024", "128B stage 1"), ("1024", "128B stage 2"), ("1024", "1T stage 1"), ("1024", "1T stage 2"),
}  # fmt: skip


@pytest.mark.parametrize("cell", list(paper.zero_cells()), ids=lambda cell: f"{cell.row}-{cell.column}")
def test_zero_table(cell):
    assert cell.how == ("truncated" if (cell.row, cell.column) in TRUNCATED else "rounded")


@pytest.mark.parametrize("cell", list(paper.infinity_cells()), ids=lambda cell: f"{cell.row}-{cell.column}")
def test_infinity_memory_table(cell):
    assert cell.how == "rounded"


def test_tables_are_complete():
    assert len(list(paper.zero_cells())) == 6 * 9
    assert len(list(paper.infinity_cells())) == 5 * 6


@pytest.mark.parametrize(
    "cell", [paper.Cell("", "", "41.3", 41.4), paper.Cell("", "", "513", 514.0), paper.Cell("", "", "2.50", 2.51)]
)
def test_a_cell_that_differs_says_so(cell):
    assert cell.how == "differs"


@pytest.mark.parametrize("point", paper.efficiency_points(), ids=lambda point: point.statement)
def test_efficiency_points(point):
    assert point.holds


def test_efficiency_values():
    assert [round(point.computed, 2) for point in paper.efficiency_points()] == [50.59, 1.23, 58.41]


@given(st.floats(0.01, 0.99), st.floats(1, 1e6), st.floats(1e12, 1e15))
def test_bandwidth_is_the_inverse_of_efficiency(share, intensity, flops_per_s):
    rate = formulas.bandwidth_for(share, intensity, flops_per_s)
    assert formulas.efficiency(intensity, rate, flops_per_s) == pytest.approx(share)


def test_communication_volume():
    assert [formulas.zero_volume_params(7.5e9, stage) for stage in range(4)] == [15e9, 15e9, 15e9, 22.5e9]


@given(st.integers(1, 10**12), st.integers(1, 4096))
def test_zero_states(params, ranks):
    by_stage = [formulas.zero_state_bytes(params, ranks, stage) for stage in range(4)]
    assert by_stage == sorted(by_stage, reverse=True)
    assert by_stage == pytest.approx(
        [16 * params, 4 * params + 12 * params / ranks, 2 * params + 14 * params / ranks, 16 * params / ranks]
    )


def test_step_flops():
    assert formulas.step_flops(1e9, 2, 1024) == 8 * 2 * 1024 * 1e9
    assert formulas.step_flops(1e9, 2, 1024, recompute=False) == 6 * 2 * 1024 * 1e9


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: formulas.zero_state_bytes(1, 1, 4), "stage is 0, 1, 2 or 3, got 4"),
        (lambda: formulas.zero_state_bytes(-1, 1, 1), "params must not be negative, got -1"),
        (lambda: formulas.zero_state_bytes(1, 0, 1), "ranks must be greater than zero, got 0"),
        (lambda: formulas.checkpoint_bytes(1, 1, 1, 1, 0), "every must be greater than zero"),
        (lambda: formulas.efficiency(1, float("nan"), 1), "bytes_per_s must not be negative, got nan"),
        (lambda: formulas.bandwidth_for(1, 1, 1), "at least 0 and below 1, got 1"),
        (lambda: Work(flops=-1), "flops must not be negative"),
        (lambda: Ceilings(flops_per_s=-1), "flops_per_s must not be negative"),
        (lambda: paper.fits("ZeRO-4", 1, 1024, load("dgx-2")), "system is one of plain DP"),
    ],
)
def test_bad_input(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_lower_bound_of_a_step_on_the_reference_machine():
    # One H200: 3.5e9 parameters on the host, gathered twice, gradients once; 8 samples of 2048 tokens, recomputed.
    params = 3.5e9
    work = Work(
        flops=formulas.step_flops(params, 8, 2048),
        host_to_device_bytes=2 * 2 * params,
        device_to_host_bytes=2 * params,
        host_memory_bytes=formulas.UPDATE_SPLIT_BYTES * params,
    )
    ceilings = Ceilings(
        flops_per_s=785e12, host_to_device_bytes_per_s=55e9, device_to_host_bytes_per_s=55e9, host_link_bytes_per_s=94e9,
        host_memory_bytes_per_s=130e9,
    )  # fmt: skip
    bound = lower_bound(work, ceilings)
    assert bound.limit == "host memory"
    assert bound.step_s == pytest.approx(0.70)
    assert bound.seconds["host to device"] == pytest.approx(14 / 55)
    assert bound.seconds["host link, both ways"] == pytest.approx(21 / 94)
    assert bound.seconds["compute"] == pytest.approx(0.584, abs=1e-3)
    assert "disk, reads and writes" not in bound.seconds  # no such limit was given
    assert bound.seconds["disk reads"] == 0


def test_lower_bound_when_reads_and_writes_share_a_disk():
    work = Work(disk_read_bytes=12e9, disk_write_bytes=12e9)
    apart = Ceilings(flops_per_s=1, disk_read_bytes_per_s=3e9, disk_write_bytes_per_s=2.2e9)
    shared = Ceilings(flops_per_s=1, disk_read_bytes_per_s=3e9, disk_write_bytes_per_s=2.2e9, disk_bytes_per_s=2.7e9)
    assert (lower_bound(work, apart).limit, lower_bound(work, shared).limit) == ("disk writes", "disk, reads and writes")
    assert lower_bound(work, shared).step_s == pytest.approx(24 / 2.7)


def test_lower_bound_refuses_what_the_machine_lacks():
    with pytest.raises(ValueError, match=r"disk reads: the step needs 1e\+09 of it, but the machine has none"):
        lower_bound(Work(disk_read_bytes=1e9), Ceilings(flops_per_s=1e12))


# Ratio of the computed to the published size: formulas only, and with DeepSpeed's buckets. docs/paper-tables.md says why.
LARGEST_RATIOS = {
    "plain DP": (1.21, 1.21),
    "ZeRO-Offload": (1.28, 0.94),
    "ZeRO-3": (1.31, 0.96),
    "Infinity, host": (1.06, 1.06),
    "Infinity, disk": (1.40, 1.40),
}


def test_largest_models_on_a_dgx2():
    found = (paper.largest_on_dgx2(), paper.largest_on_dgx2(paper.DEEPSPEED_BUCKET_BYTES))
    ratios = {
        name: tuple(round(sizes[name].params / published, 2) for sizes in found)
        for name, published in paper.LARGEST_PARAMS.items()
    }
    assert ratios == LARGEST_RATIOS


@pytest.mark.parametrize("system", paper.LARGEST_PARAMS)
def test_the_search_finds_the_edge(system):
    machine = load("dgx-2")
    best = paper.largest(system, machine)
    assert paper.fits(system, best.layers, best.hidden, machine)
    assert not paper.fits(system, best.layers + 1, best.hidden, machine)


def test_32_trillion_fit_32_nodes_with_tiles():
    cluster = load("dgx-2").with_nodes(paper.CLUSTER_NODES)
    assert paper.largest("Infinity, disk", cluster, tiles=16).params > paper.CLUSTER_PARAMS
    assert paper.largest("Infinity, disk", cluster).params < paper.CLUSTER_PARAMS  # the largest operator does not fit whole


def test_tiling_agrees_with_one_published_number_at_a_time():
    assert {tiles: paper.largest_hidden(tiles, together=True) for tiles in paper.TILING} == {1: 8192, 16: 32768}
    assert {tiles: paper.largest_hidden(tiles, together=False) for tiles in paper.TILING} == {1: 16384, 16: 65536}
