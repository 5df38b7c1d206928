"""The formulas against every published number."""

import pytest

from bench import paper
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


def test_an_unknown_system():
    with pytest.raises(ValueError, match="system is one of plain DP"):
        paper.fits("ZeRO-4", 1, 1024, load("dgx-2"))


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
