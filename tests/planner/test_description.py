"""Models described by a shape, a module or a config."""

import json

import pytest
import torch
from torch import nn

from unwall.planner import formulas
from unwall.planner.configs import from_config
from unwall.planner.description import DescriptionError, from_module, from_shape

LLAMA_7B = {
    "model_type": "llama", "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32,
    "vocab_size": 32000, "tie_word_embeddings": False,
}  # fmt: skip
LLAMA_70B = LLAMA_7B | {
    "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8,
    "vocab_size": 128256,
}  # fmt: skip
MIXTRAL = LLAMA_7B | {
    "model_type": "mixtral", "intermediate_size": 14336, "num_key_value_heads": 8, "num_local_experts": 8, "num_experts_per_tok": 2,
}  # fmt: skip
QWEN2_7B = {
    "model_type": "qwen2", "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28,
    "num_key_value_heads": 4, "vocab_size": 152064,
}  # fmt: skip
QWEN3_30B = {
    "model_type": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768, "num_hidden_layers": 48,
    "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8,
    "vocab_size": 151936, "mlp_only_layers": [], "decoder_sparse_step": 1,
}  # fmt: skip
GPT2 = {"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "n_positions": 1024, "vocab_size": 50257}
T5_SMALL = {"model_type": "t5", "d_model": 512, "d_kv": 64, "d_ff": 2048, "num_layers": 6, "num_heads": 8, "vocab_size": 32128}
FLAN_XL = T5_SMALL | {
    "d_model": 2048, "d_ff": 5120, "num_layers": 24, "num_heads": 32, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False,
}  # fmt: skip


# What transformers builds for the same configs (checked with 5.17.0, on the meta device; flan-t5-xl: as published).
@pytest.mark.parametrize(
    ("config", "params"),
    [
        (LLAMA_7B, 6_738_415_616),
        (LLAMA_70B, 70_553_706_496),
        (
            LLAMA_70B | {"num_hidden_layers": 32, "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32},
            8_030_261_248,
        ),
        (QWEN2_7B, 7_615_616_512),
        (MIXTRAL, 46_702_792_704),
        (QWEN3_30B, 30_532_122_624),
        (GPT2, 124_439_808),
        (T5_SMALL, 60_506_624),
        (FLAN_XL, 2_849_757_184),
    ],
    ids=lambda value: value["model_type"] if isinstance(value, dict) else str(value),
)
def test_params_of_known_models(config, params):
    assert from_config(config).params == params


def test_only_the_chosen_experts_compute():
    found = from_config(MIXTRAL)
    assert found.active_params == 12_748_587_008
    assert found.largest_numel == 8 * 2 * 14336 * 4096  # all experts' gate and up projections are one parameter


def test_flops_of_a_llama_are_six_a_weight_and_causal_attention():
    dense = 32 * (4 * 4096**2 + 3 * 4096 * 11008) + 32000 * 4096
    attention = 6 * 32 * 4096 * 2048 * 2048 * 4
    assert from_config(LLAMA_7B).flops(4, 2048) == 6 * dense * 4 * 2048 + attention


def test_config_from_a_file_and_a_directory(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(GPT2))
    assert from_config(tmp_path) == from_config(tmp_path / "config.json") == from_config(str(tmp_path)) == from_config(GPT2)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, "model_type None is not known, only gpt2, llama"),
        ({"model_type": "mamba"}, "model_type 'mamba' is not known"),
        ({"model_type": ["llama"]}, r"model_type \['llama'\] is not known"),
        ({"model_type": "llama"}, "llama config: hidden_size is missing, so the model has no size"),
        ({"model_type": "gpt2"}, "gpt2 config: n_embd or hidden_size is missing"),
        ({"model_type": "t5"}, "t5 config: d_model is missing"),
        (LLAMA_7B | {"num_hidden_layers": -3}, "num_hidden_layers must be a whole number above 0, got -3"),
        (LLAMA_7B | {"vocab_size": "many"}, "vocab_size must be a whole number above 0, got 'many'"),
        (LLAMA_7B | {"num_attention_heads": 8192}, "8192 heads, 8192 for keys, do not divide the hidden size 4096"),
        (QWEN3_30B | {"mlp_only_layers": [0]}, "some layers have no experts"),
    ],
)
def test_bad_config(config, message):
    with pytest.raises(DescriptionError, match=message):
        from_config(config)


@pytest.mark.parametrize(
    ("content", "message"), [(b"{", "is not JSON"), (b"\xff\xfe", "is not JSON"), (b"3", "expected an object")]
)
def test_broken_config_file(tmp_path, content, message):
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(DescriptionError, match=message):
        from_config(tmp_path)


def test_missing_config_file(tmp_path):
    with pytest.raises(DescriptionError, match=r"config\.json: cannot be read: No such file"):
        from_config(tmp_path)


@pytest.mark.parametrize(("layers", "hidden", "heads"), [(80, 10240, 128), (128, 25600, 256), (315, 163840, 1024)])
def test_a_shape_is_what_the_paper_counts(layers, hidden, heads):
    found = from_shape(f"{layers}x{hidden}x{heads}")
    assert found == from_shape((layers, hidden), heads=heads)
    assert found.blocks == layers
    assert found.params == found.active_params == formulas.transformer_params(layers, hidden)
    assert found.flops(2, 1024, recompute=True) == formulas.step_flops(found.params, 2, 1024)
    assert found.flops(2, 1024) == formulas.step_flops(found.params, 2, 1024, recompute=False)
    assert found.activation_bytes(2, 1024) == formulas.activation_bytes(2, 1024, hidden, heads, layers)
    assert found.checkpoint_bytes(2, 1024) == formulas.checkpoint_bytes(2, 1024, hidden, layers)
    assert found.state_working_bytes == formulas.state_working_bytes(hidden)
    for every in (1, 4):
        assert found.activation_working_bytes(2, 1024, every) == formulas.activation_working_bytes(
            2, 1024, hidden, heads, every
        )


def test_checkpoints_of_layers_that_do_not_divide():
    assert from_shape("5x128").checkpoint_bytes(1, 10, every=2) == 2 * 10 * 128 * 3  # before layers 0, 2 and 4
    with pytest.raises(DescriptionError, match="at least 1, got 0"):
        from_shape("5x128").checkpoint_bytes(1, 10, every=0)


def test_a_shape_with_a_vocabulary():
    found = from_shape("2x128", vocab=1000)
    assert found.params == 2 * 12 * 128**2 + 2 * 1000 * 128
    assert found.active_params == 2 * 12 * 128**2 + 1000 * 128


@pytest.mark.parametrize("wrong", ["", "80", "80x", "80*10240", "-80x10240", "80x10240x", "axb", "8.5x128"])
def test_unreadable_shape(wrong):
    with pytest.raises(DescriptionError, match=r"cannot read the shape .* such as 80x10240"):
        from_shape(wrong)


@pytest.mark.parametrize(
    ("shape", "what"), [("0x128", "layers"), ("8x0", "hidden size"), ("8x128x0", "heads"), ((-1, 128), "layers")]
)
def test_impossible_shape(shape, what):
    with pytest.raises(DescriptionError, match=f"{what} must be at least 1"):
        from_shape(shape)


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)


class Decoder(nn.Module):
    def __init__(self, width, layers, vocab, tied):
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.head = nn.Linear(width, vocab, bias=False)
        if tied:
            self.head.weight = self.embed.weight


@pytest.mark.parametrize("tied", [False, True])
def test_a_module_on_the_meta_device(tied):
    with torch.device("meta"):
        model = Decoder(8192, 40, 50000, tied)  # 32B parameters: no machine that runs this test holds them
    found = from_module(model, name="mine")
    shape = from_shape("40x8192", vocab=50000)
    assert found.name == "mine"
    assert found.params == sum(param.numel() for param in model.parameters())
    assert found.active_params == shape.active_params  # a tied head is passed all the same
    assert [(part.name, part.count, part.is_block) for part in found.parts] == [
        ("embed", 1, False),
        ("blocks", 40, True),
        ("head", 1, False),
    ]
    assert found.checkpoint_bytes(1, 2048) == shape.checkpoint_bytes(1, 2048)
    block = found.parts[1]
    assert (block.token_numel, block.boundary_numel, block.largest_numel) == (16 * 8192, 8192, 4 * 8192**2)
    assert found.largest_numel == 50000 * 8192


def test_blocks_that_differ_are_parts_of_their_own():
    class Layer(nn.Module):
        def __init__(self, rows):
            super().__init__()
            self.inner = nn.Linear(8, rows)

    with torch.device("meta"):
        model = nn.Sequential(Layer(8), Layer(8), nn.ReLU(), Layer(2), nn.Linear(2, 2))
    found = from_module(model).parts
    assert [(part.count, part.numel, part.is_block) for part in found] == [(2, 72, True), (1, 18, True), (1, 6, False)]


def test_a_module_with_experts_in_one_parameter():
    class Experts(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = nn.Parameter(torch.empty(8, 32, 16)), nn.Parameter(torch.empty(8, 16, 32))

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.experts, self.router = Experts(), nn.Linear(16, 8, bias=False)

    class Config:
        num_local_experts, num_experts_per_tok = 8, 2

    with torch.device("meta"):
        model = nn.Module()
        model.layers = nn.ModuleList([Layer()])
    assert from_module(model).active_params == from_module(model).params  # nothing says how many are chosen
    model.config = Config()
    assert from_module(model).active_params == 2 * (16 * 32 * 2) + 16 * 8


def test_a_module_without_parameters():
    with pytest.raises(DescriptionError, match="ReLU has no parameters"):
        from_module(nn.ReLU())
