"""Building and loading: ``init`` around whatever a constructor does, real models from files, the meta device."""

import pytest
import torch
import transformers
from models import NestedNet
from ranks import rank_and_world
from reference import FP32, assert_equal, seeded, unwall_adamw, whole_state
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import unwall
from unwall.plans import Plan
from unwall.shards.control import DivergedError

TEXT = {"vocab_size": 48, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
TEXT |= {"num_key_value_heads": 1, "max_position_embeddings": 32}
GPT2 = {"vocab_size": 48, "n_positions": 32, "n_embd": 16, "n_layer": 2, "n_head": 2, "bos_token_id": 0, "eos_token_id": 1}
T5 = {"vocab_size": 48, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2, "decoder_start_token_id": 0}
VIT = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 16}
MOE = {**TEXT, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "head_dim": 8}
MODELS = {
    "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**TEXT)),
    "qwen3-moe": lambda: transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**MOE)),
    "gpt2": lambda: transformers.GPT2LMHeadModel(transformers.GPT2Config(**GPT2)),
    "t5": lambda: transformers.T5ForConditionalGeneration(transformers.T5Config(**T5)),
    "vit": lambda: transformers.ViTForImageClassification(transformers.ViTConfig(**VIT, patch_size=8, num_labels=5)),
}
TIERS = {"device": {}, "host": {"params": "host", "optimizer": "host"}, "disk": {"params": "disk", "optimizer": "disk"}}


def run(name, model):
    torch.manual_seed(3)
    if name == "vit":
        return model(pixel_values=torch.randn(2, 3, 16, 16)).logits
    ids = torch.randint(2, 48, (2, 8))
    return model(input_ids=ids, **({"labels": ids} if name == "t5" else {})).logits


def from_files(names, folder, tier, way):
    """Each model read inside ``init``, or built on the meta device and loaded; its values, and what it computes."""
    found = {}
    for name in names:
        torch.manual_seed(9)
        plain = MODELS[name]().eval()
        if way == "init":
            with unwall.init():
                model = type(plain).from_pretrained(folder / name)
        else:
            with torch.device("meta"):
                model = type(plain)(plain.config).eval()
        unwall.shard(model, Plan(compute_dtype=torch.float32, disk=folder if tier == "disk" else None, **TIERS[tier]))
        if way == "meta":
            with pytest.raises(RuntimeError, match=r"weight.*came from the meta device and have no values yet"):
                run(name, model)
            model.load_state_dict(type(plain).from_pretrained(folder / name).state_dict())
        with torch.no_grad():
            found[name] = run(name, model), whole_state(model)
    return found


@pytest.mark.parametrize(
    ("world", "tier", "way"), [(1, "disk", "init"), (2, "host", "init"), (1, "device", "meta"), (2, "host", "meta")]
)
def test_models_from_files(ranks, tmp_path, world, tier, way):
    expected = {}
    for name, build in MODELS.items():
        torch.manual_seed(0)
        plain = build().eval()
        plain.save_pretrained(tmp_path / name)
        with torch.no_grad():
            expected[name] = run(name, plain), plain.state_dict()
    got = ranks(world).run(from_files, list(MODELS), tmp_path, tier, way)[0]
    for name, (logits, state) in expected.items():
        assert_equal(state, got[name][1])
        torch.testing.assert_close(got[name][0], logits, rtol=1e-5, atol=1e-6)


class Rewritten(nn.Module):
    """A constructor that gives parameters other data, of the same shape and of another one."""

    def __init__(self, source=torch.nn.functional.tanh):
        super().__init__()
        self.first, self.second = nn.Linear(32, 32), nn.Linear(32, 32)
        self.first.weight.data = source(torch.randn(32, 32))
        self.second.weight.data = torch.randn(16, 32).t().contiguous().t()
        self.second.bias.data = self.first.weight.data[0, :16].clone()
        self.more = nn.ModuleList([nn.Linear(700, 700) for _ in range(4)])  # pushes the others out
        self.first.weight.data.mul_(2)

    def forward(self, x):
        return self.second(self.first(x))


def built_inside(seed_by_rank):
    torch.manual_seed(rank_and_world()[0] if seed_by_rank else 0)
    with unwall.init(), unwall.init():
        model = Rewritten()
    return whole_state(unwall.shard(model, FP32))


@pytest.mark.parametrize("world", [1, 2])
def test_data_given_in_a_constructor_counts_and_init_may_be_nested(ranks, world):
    assert_equal(seeded(Rewritten).state_dict(), ranks(world).run(built_inside, False)[0])


def test_values_that_differ_by_rank_are_those_of_rank_0(ranks):
    assert_equal(seeded(Rewritten).state_dict(), ranks(2).run(built_inside, True)[0])


def only_rank_0_writes():
    with unwall.init():
        model = nn.Sequential(*[nn.Linear(700, 700) for _ in range(6)])
        nn.init.zeros_(model[0 if rank_and_world()[0] == 0 else 1].weight)


def told_apart():
    with pytest.raises(DivergedError, match=r"inside unwall\.init"):
        only_rank_0_writes()


def test_a_rank_that_writes_alone_inside_init_is_told(ranks):
    ranks(2).run(told_apart)


def test_shard_inside_init_is_refused():
    with unwall.init():
        model = seeded(NestedNet)
        with pytest.raises(RuntimeError, match="leave the init context first"):
            unwall.shard(model, FP32)
    assert_equal(seeded(NestedNet).state_dict(), whole_state(unwall.shard(model, FP32)))


class Table(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.register_buffer("table", torch.arange(4.0), persistent=False)

    def forward(self, x):
        return self.norm(self.linear(x)) + self.table


def test_buffers_left_on_meta_are_named():
    with torch.device("meta"):
        model = Table()
    for _ in range(2):
        with pytest.raises(ValueError, match=r"^table are buffers on the meta device"):
            unwall.shard(model, FP32)
    model.table = torch.arange(4.0)
    unwall.shard(model, FP32)
    state = seeded(Table).state_dict()
    model.load_state_dict({name: value for name, value in state.items() if "running_mean" not in name}, strict=False)
    with pytest.raises(RuntimeError, match=r"^norm\.running_mean came from the meta device"):
        model(torch.ones(2, 4))
    model.load_state_dict(state)
    assert torch.equal(model(torch.ones(2, 4)), seeded(Table)(torch.ones(2, 4)))


def test_a_model_from_meta_trains_once_it_was_written():
    with torch.device("meta"):
        model = nn.Linear(4, 4)
    unwall.shard(model, FP32)
    optimizer = unwall_adamw(model)
    with pytest.raises(RuntimeError, match=r"^weight, bias came from the meta device"):
        model(torch.ones(2, 4))
    with unwall.full_params(model, write=True):
        for param in model.parameters():
            nn.init.ones_(param)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    assert all(value.isfinite().all() for value in model.state_dict().values())


def test_a_malformed_world_size_is_named(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "two")
    with pytest.raises(RuntimeError, match="WORLD_SIZE is 'two'"):
        unwall.shard(nn.Linear(4, 4))


def on_a_mesh(shape):
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp_replicate", "dp_shard"))
    return whole_state(unwall.shard(seeded(NestedNet), FP32, mesh))


def test_a_dimension_of_one_replica_changes_nothing(ranks):
    assert_equal(seeded(NestedNet).state_dict(), ranks(2).run(on_a_mesh, (1, 2))[0])


@pytest.mark.parametrize("tier", ["device", "host"])
def test_a_frozen_fp8_parameter_stays_as_it_is(tier):
    model = nn.Linear(4, 4)
    model.scale = nn.Parameter(torch.arange(4.0).to(torch.float8_e4m3fn), requires_grad=False)
    unwall.shard(model, Plan(**TIERS[tier]))
    optimizer = unwall_adamw(model)
    model(torch.ones(2, 4)).float().sum().backward()
    optimizer.step()
    state = model.state_dict()
    assert state["scale"].dtype is torch.float8_e4m3fn
    assert state["scale"].float().tolist() == [0, 1, 2, 3]
    model.load_state_dict(state)
    assert model.state_dict()["scale"].float().tolist() == [0, 1, 2, 3]
