"""Full precision means full precision: the master of a bf16 model comes out, and goes in, whole."""

import copy
import tempfile

import pytest
import torch
import transformers
from ranks import rank_and_world
from safetensors.torch import load_file
from torch import nn

import unwall

WIDTH = 48


def build(dtype=torch.bfloat16):
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(3)]).to(dtype)


def shard(model, tier="device", **options):
    tiers = {} if tier == "device" else {"params": tier, "optimizer": tier}
    if tier == "disk":
        tiers["disk"] = tempfile.mkdtemp()
    return unwall.shard(model, unwall.Plan(**tiers, **options))


def steps(model, optimizer, count):
    for seed in range(count):
        x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(seed))
        model(x).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def resumed(tier):
    model = shard(build(), tier)
    optimizer = unwall.AdamW(model.parameters(), lr=1e-3)
    steps(model, optimizer, 4)
    state, states = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    other = shard(build(), tier)
    other_optimizer = unwall.AdamW(other.parameters(), lr=1e-3)
    _rank, world = rank_and_world()
    if world > 1:
        box = [state]
        torch.distributed.broadcast_object_list(box, src=0)
        state = box[0]
    other.load_state_dict(state)
    other_optimizer.load_state_dict(states)
    steps(model, optimizer, 4)
    steps(other, other_optimizer, 4)
    return state, dict(model.state_dict()), dict(other.state_dict())


@pytest.mark.parametrize("world", [1, 2])
def test_a_bf16_model_resumes_bit_by_bit(ranks, world):
    for tier in ("device", "host", "disk") if world == 1 else ("device", "disk"):
        state, went_on, came_back = ranks(world).run(resumed, tier)[0]
        assert all(value.dtype is torch.float32 for value in state.values())
        assert all(torch.equal(went_on[name], came_back[name]) for name in went_on)


@pytest.mark.parametrize("tier", ["device", "host", "disk"])
def test_narrow_values_and_writes_keep_the_remainder(tier):
    model = shard(build(), tier)
    optimizer = unwall.AdamW(model.parameters(), lr=1e-3)
    steps(model, optimizer, 2)
    whole = {name: value.clone() for name, value in model.state_dict().items()}
    weight = model[1].weight
    assert weight.dtype is torch.bfloat16
    assert weight.detach().dtype is torch.bfloat16
    with torch.no_grad():
        weight[0] = 1.0
    with unwall.full_params(model[0], write=True, dtype=torch.bfloat16):
        assert model[0].weight.dtype is torch.bfloat16
        model[0].weight.data[0] = 2.0
    after = model.state_dict()
    for name, value in (("1.weight", 1.0), ("0.weight", 2.0)):
        assert (after[name][0] == value).all()
        assert torch.equal(after[name][1:], whole[name][1:])
    model.load_state_dict({name: value.bfloat16() for name, value in whole.items()})
    assert torch.equal(model.state_dict()["1.weight"], whole["1.weight"].bfloat16().float())


def chosen_rank():
    model = shard(build(torch.float32), "host", compute_dtype=torch.bfloat16)
    rank, _ = rank_and_world()
    params = [model[0].weight, model[2].bias]
    with unwall.full_params(params, write=True, rank=1):
        assert type(model[1].weight) is not nn.Parameter
        for param in params:
            param.data.fill_(1 / 3 + rank)
    with unwall.full_params(model):
        return [param.detach().clone() for param in model.parameters()]


def test_full_params_of_a_list_written_by_a_chosen_rank(ranks):
    plain = list(build(torch.float32).parameters())
    for found in ranks(2).run(chosen_rank):
        assert (found[0] == torch.tensor(4 / 3)).all()
        assert (found[5] == torch.tensor(4 / 3)).all()
        assert torch.equal(found[1], plain[1])
    with pytest.raises(ValueError, match="rank=1"), unwall.full_params(shard(build()), rank=1):
        pass


def saved(folder, dtype):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        tie_word_embeddings=True,
    )
    model = transformers.LlamaForCausalLM(config).to(dtype)
    unwall.shard(model, unwall.Plan(params="host", optimizer="host"))
    optimizer = unwall.AdamW(model.parameters(), lr=1e-3)
    ids = torch.arange(16).view(2, 8)
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    model.save_pretrained(folder)
    state = model.state_dict()
    if state:
        assert state["lm_head.weight"].data_ptr() == state["model.embed_tokens.weight"].data_ptr()
    return {name: value.clone() for name, value in state.items()}


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_save_pretrained_writes_the_dtype_of_the_config(ranks, tmp_path, dtype, world):
    state = ranks(world).run(saved, str(tmp_path), dtype)[0]
    written = load_file(tmp_path / "model.safetensors")
    config = transformers.AutoConfig.from_pretrained(tmp_path)
    assert config.dtype == dtype
    assert {value.dtype for value in written.values()} == {dtype}
    assert "lm_head.weight" not in written
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype)
    for name, value in again.state_dict().items():
        torch.testing.assert_close(value, state[name].to(dtype), rtol=0, atol=0)
