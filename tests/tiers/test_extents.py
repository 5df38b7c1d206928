"""The free list against a model: a set of pages that are taken."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unwall.tiers.extents import Extent, FreeList
from unwall.tiers.sizes import ALIGNMENT, align_up

PAGES = 24

Step = tuple[str, int]
steps = st.lists(
    st.one_of(
        st.tuples(st.just("take"), st.integers(1, 8 * ALIGNMENT)),
        st.tuples(st.just("give back"), st.integers(0, 1000)),
        st.tuples(st.just("grow"), st.integers(1, 4)),
    ),
    max_size=60,
)


def pages(extents: tuple[Extent, ...]) -> list[int]:
    assert all(extent.offset % ALIGNMENT == 0 and extent.nbytes % ALIGNMENT == 0 and extent.nbytes for extent in extents)
    return [page for extent in extents for page in range(extent.offset // ALIGNMENT, extent.end // ALIGNMENT)]


def check_holes(free: FreeList, taken: set[int]) -> None:
    assert set(pages(free.holes)) == set(range(free.size_bytes // ALIGNMENT)) - taken
    assert all(left.end < right.offset for left, right in zip(free.holes, free.holes[1:], strict=False)), "merged, in order"


@given(steps)
@settings(max_examples=300, deadline=None)
def test_against_a_model(steps: list[Step]):
    free, taken = FreeList(PAGES * ALIGNMENT), set()
    blocks: list[tuple[Extent, ...]] = []
    for what, number in steps:
        if what == "grow":
            free.grow(number * ALIGNMENT)
        elif what == "give back":
            if blocks:
                block = blocks.pop(number % len(blocks))
                free.give_back(block)
                taken -= set(pages(block))
        elif free.shortage(number):
            assert free.shortage(number) == align_up(number) - free.free_bytes
            with pytest.raises(ValueError, match=f"{align_up(number)} bytes wanted, {free.free_bytes} free"):
                free.take(number)
        else:
            holes = free.holes
            block = free.take(number)
            got = pages(block)
            assert len(got) * ALIGNMENT == align_up(number)
            assert len(set(got)) == len(got)
            assert not taken & set(got), "handed out twice"
            assert len(block) == 1 or all(hole.nbytes < align_up(number) for hole in holes), "split without need"
            taken |= set(got)
            blocks.append(block)
        check_holes(free, taken)
    for block in blocks:
        free.give_back(block)
    assert free.holes == (Extent(0, free.size_bytes),)


def test_best_fit():
    free = FreeList(10 * ALIGNMENT)
    parts = [free.take(size * ALIGNMENT) for size in (3, 1, 2, 1, 3)]
    for at in (0, 2):
        free.give_back(parts[at])
    assert free.take(2 * ALIGNMENT) == parts[2], "the hole of 3 stays whole"


def test_a_double_free_is_refused():
    free = FreeList(4 * ALIGNMENT)
    block = free.take(2 * ALIGNMENT)
    free.give_back(block)
    with pytest.raises(ValueError, match="is free already"):
        free.give_back(block)
    assert free.holes == (Extent(0, 4 * ALIGNMENT),)


@pytest.mark.parametrize(
    "extent", [Extent(ALIGNMENT, 2 * ALIGNMENT), Extent(0, 4 * ALIGNMENT), Extent(2 * ALIGNMENT, ALIGNMENT)]
)
def test_partly_free_is_refused(extent):
    free = FreeList(4 * ALIGNMENT)
    free.take(2 * ALIGNMENT)
    with pytest.raises(ValueError, match="is free already"):
        free.give_back((extent,))


def test_the_same_extent_twice_in_one_call_is_refused():
    free = FreeList(4 * ALIGNMENT)
    (extent,) = free.take(ALIGNMENT)
    with pytest.raises(ValueError, match="is free already"):
        free.give_back((extent, extent))
    check_holes(free, set())


@pytest.mark.parametrize(
    "extent", [Extent(-ALIGNMENT, ALIGNMENT), Extent(3 * ALIGNMENT, 2 * ALIGNMENT), Extent(8 * ALIGNMENT, ALIGNMENT)]
)
def test_outside_the_file_is_refused(extent):
    free = FreeList(4 * ALIGNMENT)
    free.take(4 * ALIGNMENT)
    with pytest.raises(ValueError, match="lies outside the file of 16384 bytes"):
        free.give_back((extent,))


@pytest.mark.parametrize("nbytes", [0, -1])
def test_nothing_cannot_be_taken(nbytes):
    with pytest.raises(ValueError, match="an extent has at least one byte"):
        FreeList(ALIGNMENT).take(nbytes)


def test_growth_is_aligned():
    with pytest.raises(ValueError, match="grows by multiples of 4096 bytes, got 100"):
        FreeList(100)
