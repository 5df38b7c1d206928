"""Models that would let samples of one sequence see each other get one sample per sequence."""

import json

import pytest
import torch
import transformers
from train_tools import make_jsonl, make_model, make_plan, make_tokenizer, read_log, train_here

from unwall.train import command
from unwall.train.apart import keeps_apart
from unwall.train.batches import Packer, my_lanes
from unwall.train.data import open_data
from unwall.train.files import make_index
from unwall.train.packing import to_tensors
from unwall.train.tokens import Encoder

SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 260}
SHARED = {**SMALL, "intermediate_size": 48, "num_key_value_heads": 2, "max_position_embeddings": 128}
CONFIGS = {
    "llama": transformers.LlamaConfig(**SHARED),
    "mistral": transformers.MistralConfig(**SHARED),  # chooses the function that makes its mask
    "gemma3_text": transformers.Gemma3TextConfig(**SHARED, head_dim=8),  # hands a dict to it
    "seed_oss": transformers.SeedOssConfig(**SHARED, head_dim=8),
    "gpt_oss": transformers.GptOssConfig(**SHARED, head_dim=8, num_local_experts=2, num_experts_per_tok=1),
    "gpt2": transformers.GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=260, n_positions=128),
    "opt": transformers.OPTConfig(**SMALL, ffn_dim=48, max_position_embeddings=128, word_embed_proj_dim=32),
    "gpt_neox": transformers.GPTNeoXConfig(**SMALL, intermediate_size=48),
    "gemma2": transformers.Gemma2Config(**SHARED, head_dim=8, sliding_window=6),
    "phi3": transformers.Phi3Config(**SHARED, pad_token_id=0),
    "qwen2": transformers.Qwen2Config(**SHARED, use_sliding_window=True, sliding_window=5, max_window_layers=0),
    "qwen3": transformers.Qwen3Config(**SHARED, head_dim=8),
    "mixtral": transformers.MixtralConfig(**SHARED, num_local_experts=2),
    "falcon": transformers.FalconConfig(**SMALL),
    "bloom": transformers.BloomConfig(hidden_size=32, n_layer=2, n_head=4, vocab_size=260),
    "mamba": transformers.MambaConfig(hidden_size=32, num_hidden_layers=2, vocab_size=260),
}


@pytest.mark.parametrize("kind", CONFIGS)
def test_what_is_read_from_the_source_is_what_the_model_does(kind):
    torch.manual_seed(1)
    model = transformers.AutoModelForCausalLM.from_config(CONFIGS[kind]).eval()
    with torch.no_grad():
        for param in model.parameters():
            if param.dim() > 1:
                param.normal_(std=0.3)
        first, other, behind = (torch.randint(2, 250, (1, 9)) for _ in range(3))
        positions = torch.arange(9).repeat(2)[None]
        seen = [
            model(input_ids=torch.cat([before, behind], 1), position_ids=positions, use_cache=False).logits[:, 9:]
            for before in (first, other)
        ]
    assert torch.allclose(*seen, atol=1e-4) == keeps_apart(CONFIGS[kind])


def test_a_sequence_of_one_sample(tmp_path):
    tokenizer = make_tokenizer(tmp_path / "tokenizer")
    make_index(make_jsonl(tmp_path / "a.jsonl", 12), tmp_path / "index")
    data = open_data([tmp_path / "a.jsonl"], tmp_path / "index", Encoder(tokenizer), True)
    packer = Packer(data, data.order(1), my_lanes(2, 0, 1, None, data.size, True), 48, 0)
    seen = []
    while (batch := packer.step()).tokens:
        assert set(to_tensors(batch.sequences, torch.device("cpu"))) == {"input_ids", "labels"}
        seen += [sample for each in batch.sequences for sample in each.samples]
        assert all(len(each.samples) <= 1 for each in batch.sequences)
    assert set(seen) == set(range(12))


@pytest.mark.parametrize("kind", ["falcon", "mamba"])  # mamba casts its logits, so its head cannot wait for the loss
def test_such_a_model_trains(kind, tmp_path, capsys):
    torch.manual_seed(1)
    transformers.AutoModelForCausalLM.from_config(CONFIGS[kind]).save_pretrained(tmp_path / "model")
    make_tokenizer(tmp_path / "model")
    (tmp_path / "plan.toml").write_text('compute_dtype = "float32"\n')
    train_here(
        model=tmp_path / "model", data=make_jsonl(tmp_path / "a.jsonl", 6), out=tmp_path / "out", plan=tmp_path / "plan.toml",
        seq=32, batch=2, epochs=1,
    )  # fmt: skip
    assert f"{kind} cannot keep samples apart" in capsys.readouterr().out
    lines = read_log(tmp_path / "out")
    assert json.loads((tmp_path / "out" / "run.json").read_text())["steps"] == len(lines) >= 3
    assert all(line["loss"] > 0 for line in lines)


def test_a_run_that_began_with_samples_packed_ends_with_its_data(tmp_path, monkeypatch):
    """It is through before the number of steps that are counted now: no step goes over padding alone."""
    given = {"model": make_model(tmp_path / "model"), "data": make_jsonl(tmp_path / "a.jsonl", 9), "out": tmp_path / "out"}
    given |= {"plan": make_plan(tmp_path / "plan.toml", "device"), "seq": 64, "batch": 1}
    train_here(**given, epochs=1, steps=2)
    monkeypatch.setattr(command, "keeps_apart", lambda config: False)
    train_here(**given, epochs=1)
    lines = read_log(tmp_path / "out")
    assert all(line["tokens"] for line in lines)
    assert 2 < len(lines) < json.loads((tmp_path / "out" / "run.json").read_text())["steps"]
