"""Layouts, block by block, as DeepSpeed documents them: X where a block of queries attends to a block of keys."""

import pytest
import torch
from torch.nn.attention.flex_attention import and_masks, create_mask, or_masks

from unwall import sparse


def drawn(layout, count, head=0):
    return ["".join("X" if seen else "." for seen in row) for row in layout.blocks(count)[head]]


def test_fixed():
    assert drawn(sparse.fixed(num_local_blocks=2), 6) == ["XX.X.X", "XX.X.X", ".XXX.X", ".XXX.X", ".X.XXX", ".X.XXX"]
    one_way = sparse.fixed(num_local_blocks=2, attention="unidirectional")
    assert drawn(one_way, 6) == ["X.....", "XX....", ".XX...", ".XXX..", ".X.XX.", ".X.XXX"]
    across = sparse.fixed(num_local_blocks=2, horizontal_global_attention=True)
    assert drawn(across, 4) == ["XX.X", "XXXX", ".XXX", "XXXX"]


def test_fixed_with_a_short_last_window():
    assert drawn(sparse.fixed(num_local_blocks=3), 5) == ["XXX.X", "XXX.X", "XXX.X", "..XXX", "..XXX"]
    assert drawn(sparse.fixed(num_local_blocks=4), 2) == ["XX", "XX"]


def test_fixed_by_head():
    layout = sparse.fixed(num_local_blocks=2, num_different_global_patterns=2, different_layout_per_head=True)
    assert drawn(layout, 4, head=0) == ["XX.X", "XX.X", ".XXX", ".XXX"]
    assert drawn(layout, 4, head=1) == ["XXX.", "XXX.", "X.XX", "X.XX"]
    mask = layout.for_tokens(64)
    tokens = torch.arange(64)
    seen = [mask(torch.tensor(0), torch.tensor(head), tokens[:, None], tokens) for head in range(4)]
    assert torch.equal(seen[0], seen[2])
    assert torch.equal(seen[1], seen[3])
    assert not torch.equal(seen[0], seen[1])


def test_variable():
    layout = sparse.variable(local_window_blocks=[1, 2], global_block_indices=[0], attention="unidirectional")
    assert drawn(layout, 5) == ["X....", "XX...", "XXX..", "X..X.", "X..XX"]
    spans = sparse.variable(local_window_blocks=[2], global_block_indices=[1], global_block_end_indices=[3])
    assert drawn(spans, 4) == ["XXX.", "XXX.", ".XXX", ".XXX"]
    across = sparse.variable(local_window_blocks=[1], global_block_indices=[2], horizontal_global_attention=True)
    assert drawn(across, 3) == ["X.X", ".XX", "XXX"]


def test_bigbird():
    without = sparse.bigbird(num_random_blocks=0)
    assert drawn(without, 5) == ["XXXXX", "XXX..", "XXXX.", "X.XXX", "X..XX"]
    assert drawn(sparse.bigbird(num_random_blocks=0, attention="unidirectional"), 4) == ["X...", "XX..", "XXX.", "X.XX"]
    random = sparse.bigbird(num_random_blocks=2, seed=3)
    more = random.blocks(12) & ~sparse.bigbird(num_random_blocks=0).blocks(12)
    assert (more[0].sum(-1) <= 2).all()
    assert more.any()
    assert torch.equal(random.blocks(12), sparse.bigbird(num_random_blocks=2, seed=3).blocks(12))
    assert not torch.equal(random.blocks(12), sparse.bigbird(num_random_blocks=2, seed=4).blocks(12))


def test_longformer_and_local():
    assert drawn(sparse.longformer(global_block_indices=[1]), 4) == ["XX..", "XXXX", ".XXX", ".XXX"]
    assert drawn(sparse.longformer(global_block_indices=[0], attention="unidirectional"), 4) == ["X...", "XX..", "XXX.", "X.XX"]
    assert drawn(sparse.local_sliding_window(), 4) == ["X...", "XX..", ".XX.", "..XX"]
    assert drawn(sparse.local_sliding_window(attention="bidirectional"), 3) == ["XX.", "XXX", ".XX"]


def mask_of(function, tokens):
    return create_mask(function, 1, 1, tokens, tokens, device="cpu")[0, 0]


def test_windows():
    assert mask_of(sparse.window(2), 4).int().tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [0, 1, 1, 0], [0, 0, 1, 1]]
    both = mask_of(sparse.window(2, "bidirectional"), 4)
    assert torch.equal(both, both.T)
    assert mask_of(sparse.dilated(2, 2), 6).int().tolist()[5] == [0, 0, 0, 1, 0, 1]


def test_patterns_combine_with_those_of_torch():
    layout = sparse.fixed(block=4, num_local_blocks=2).for_tokens(32)
    causal = and_masks(layout, lambda b, h, q, k: q >= k)
    either = or_masks(sparse.window(3), causal)
    assert torch.equal(mask_of(causal, 32), mask_of(layout, 32).tril())
    assert torch.equal(mask_of(either, 32), mask_of(layout, 32).tril() | mask_of(sparse.window(3), 32))


def test_a_section_of_deepspeed():
    section = {
        "mode": "fixed",
        "block": 8,
        "num_local_blocks": 2,
        "attention": "unidirectional",
        "different_layout_per_head": True,
    }
    assert drawn(sparse.from_deepspeed(section), 4) == drawn(sparse.fixed(num_local_blocks=2, attention="unidirectional"), 4)
    assert sparse.from_deepspeed(section).block == 8
    assert drawn(sparse.from_deepspeed({"mode": "bslongformer"}), 4) == drawn(sparse.longformer(), 4)
    with pytest.raises(ValueError, match="mode is one of fixed"):
        sparse.from_deepspeed({"mode": "dense"})
    with pytest.raises(ValueError, match=r"mode fixed: .*unexpected keyword argument 'blocks'"):
        sparse.from_deepspeed({"mode": "fixed", "blocks": 3})


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: sparse.window(0), "tokens is a whole number above 0"),
        (lambda: sparse.window(4, "forwards"), "attention is unidirectional or bidirectional"),
        (lambda: sparse.fixed(num_local_blocks=4, num_global_blocks=3), "must be a multiple"),
        (lambda: sparse.fixed(num_different_global_patterns=2), "needs different_layout_per_head"),
        (lambda: sparse.fixed(num_different_global_patterns=5, different_layout_per_head=True), "is at most"),
        (lambda: sparse.fixed(attention="unidirectional", horizontal_global_attention=True), "needs attention='bidirectional'"),
        (lambda: sparse.longformer(global_block_indices=[2], global_block_end_indices=[2]), "one end, above the start"),
        (lambda: sparse.bigbird(num_random_blocks=9).blocks(4), "at most the number of blocks in the sequence"),
    ],
)
def test_bad_input(make, message):
    with pytest.raises(ValueError, match=message):
        make()
