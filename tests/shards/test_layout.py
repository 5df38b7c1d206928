"""Every element of every parameter lies in exactly one shard, and shards are aligned."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from unwall.optim.runs import runs_of
from unwall.shards import master
from unwall.shards.layout import SLOT_BYTES, build_layout
from unwall.shards.master import join, rounded, split

SHAPES = st.lists(st.lists(st.integers(0, 40), max_size=3).map(torch.Size), min_size=1, max_size=8)
DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float64])


@given(SHAPES, DTYPES, st.integers(1, 5))
def test_segments_cover_each_parameter_once(shapes, dtype, world):
    layout = build_layout([str(index) for index in range(len(shapes))], shapes, dtype, world)
    assert layout.padded_numel == world * layout.shard_numel
    assert layout.shard_numel * 2 % 4096 == 0  # also in the 2-byte states
    seen = [torch.zeros(slot.numel, dtype=torch.int) for slot in layout.slots]
    for rank in range(world):
        for segment in layout.segments(rank):
            seen[segment.slot][segment.start : segment.start + segment.numel] += 1
            flat_start = layout.slots[segment.slot].offset + segment.start
            assert flat_start == rank * layout.shard_numel + segment.shard_start
    assert all((counts == 1).all() for counts in seen)
    assert all(slot.offset * dtype.itemsize % SLOT_BYTES == 0 for slot in layout.slots)


@given(SHAPES, st.lists(st.one_of(st.none(), st.integers(0, 1)), min_size=8, max_size=8))
def test_runs_hold_exactly_the_parameters_with_their_key(shapes, keys):
    layout = build_layout([str(index) for index in range(len(shapes))], shapes, torch.float32, 1)
    wanted = {index: key for index, key in enumerate(keys[: len(shapes)]) if key is not None}
    covered = torch.full((layout.padded_numel,), -1)
    for run in runs_of(layout.segments(0), wanted, gap=SLOT_BYTES // 4):
        assert (covered[run.start : run.end] == -1).all()
        covered[run.start : run.end] = run.key
    for index, slot in enumerate(layout.slots):
        assert (covered[slot.offset : slot.end] == wanted.get(index, -1)).all()


@given(st.lists(st.integers(-(2**31), 2**31 - 1), min_size=1, max_size=50))
def test_the_split_master_is_lossless(bits):
    values = torch.tensor(bits, dtype=torch.int64).to(torch.int32).view(torch.float32)
    again = join(*split(values))
    finite = values.isfinite()
    assert torch.equal(again[finite].view(torch.int32), values[finite].view(torch.int32))
    assert again[values.isnan()].isnan().all()


def test_masters_are_joined_and_rounded_piece_by_piece(monkeypatch):
    values = torch.randn(37, 5)
    halves, rest = split(values.view(-1))
    monkeypatch.setattr(master, "PIECE_ELEMENTS", 16)  # eleven whole pieces and nine elements
    assert torch.equal(join(halves, rest), values.view(-1))
    assert torch.equal(rounded(values, torch.bfloat16), halves.view(37, 5))
