"""Operators, stretches and skeletons."""

import pytest
import torch
from planner_tools import Decoder, decoder

from unwall.planner.configs import from_config
from unwall.planner.description import Description, from_shape
from unwall.planner.outline import outline_of, passes_of, skeleton
from unwall.plans import Plan
from unwall.shards.build import plan_groups
from unwall.shards.tiles import forced

LLAMA = {
    "model_type": "llama", "hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 1000,
}  # fmt: skip
MIXTRAL = LLAMA | {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}
CONFIGS = {
    "llama": LLAMA, "tied": LLAMA | {"tie_word_embeddings": True}, "mixtral": MIXTRAL,
    "gpt2": {"model_type": "gpt2", "n_embd": 96, "n_layer": 2, "n_head": 4, "vocab_size": 500},
    "t5": {"model_type": "t5", "d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4, "vocab_size": 200},
}  # fmt: skip


@pytest.mark.parametrize("tiles", [None, 3])
@pytest.mark.parametrize("name", [*CONFIGS, "shape"])
def test_a_skeleton_has_the_parameters_and_flops_of_its_description(name, tiles):
    described: Description = from_shape("4x256x2", vocab=100) if name == "shape" else from_config(CONFIGS[name])
    outline, plan = skeleton(described), Plan(tiles=tiles)
    assert sum(param.numel() for param in outline.module.parameters()) == described.params
    assert all(param.is_meta for param in outline.module.parameters())
    units = [unit for unit, _ in plan_groups(outline.module, plan, 2, forced(outline.module, plan))]
    stretches = outline.stretches(units)
    assert sum(stretch.flops(2, 64) for stretch in stretches) * 3 == pytest.approx(described.flops(2, 64))
    assert max(param.numel() for param in outline.module.parameters()) == described.largest_numel
    assert any(unit.is_part for unit in units) == (tiles is not None)


def test_tiles_cut_every_matrix_of_a_skeleton():
    outline, plan = skeleton(from_shape("2x128", vocab=64)), Plan(tiles=4)
    tiles = [unit for unit, _ in plan_groups(outline.module, plan, 1, forced(outline.module, plan)) if unit.is_part]
    assert len(tiles) == 4 * (2 * 4 + 2)  # four matrices per layer, the table and the head
    assert sum(unit.nbytes for unit in tiles) == 2 * outline.description.params


def test_a_module_s_operators_add_up_to_its_description():
    outline = decoder()
    stretches = outline.stretches([unit for unit, _ in plan_groups(outline.module, Plan(), 1)])
    assert sum(stretch.flops(3, 17) for stretch in stretches) * 3 == pytest.approx(outline.description.flops(3, 17))
    assert {stretch.block for stretch in stretches} == {None, *range(6)}
    assert sum(stretch.numel for stretch in stretches) == outline.description.params


def test_a_tied_head_reads_the_embedding_again():
    with torch.device("meta"):
        model = Decoder()
    model.head.weight = model.embed.weight
    groups = [unit for unit, _ in plan_groups(model, Plan(), 1)]
    stretches = outline_of(model).stretches(groups)
    assert stretches[0].groups == stretches[-1].groups
    assert stretches[-1].active_numel == model.embed.weight.numel()


def test_backward_goes_block_by_block_and_recomputes_right_before():
    outline = decoder(layers=2)
    stretches = outline.stretches([unit for unit, _ in plan_groups(outline.module, Plan(), 1)])
    order = passes_of(stretches, lambda block: block is not None)
    forward = [index for index, what in order if what == "forward"]
    backward = [index for index, what in order if what == "backward"]
    assert forward == list(range(len(stretches)))
    assert backward == forward[::-1]
    inside = [index for index, stretch in enumerate(stretches) if stretch.block == 1]
    at = order.index((inside[0], "again"))
    assert order[at : at + 2 * len(inside)] == [
        *((index, "again") for index in inside),
        *((index, "backward") for index in reversed(inside)),
    ]
    assert [what for _, what in passes_of(stretches, lambda block: False)].count("again") == 0
