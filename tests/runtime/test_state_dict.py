"""Whole tensors in and out: state_dict, full_params, building without ever being whole, the meta device."""

import pytest
import torch
import transformers
from models import NestedNet, NormNet, ScalarNet, TiedNet
from ranks import rank_and_world
from reference import (
    FP32,
    Case,
    assert_close,
    assert_equal,
    draw,
    mse,
    resident_bytes,
    seeded,
    shard_tight,
    train_plain,
    unwall_adamw,
    whole_state,
)
from torch import nn

import unwall
from unwall.plans import Plan

WORLDS = pytest.mark.parametrize("world", [1, 2, 4])
CASE = Case(build=NestedNet)


def sharded_state(build, plan):
    model = seeded(build)
    unwall.shard(model, plan)
    return whole_state(model)


@pytest.mark.parametrize("build", [TiedNet, ScalarNet, NormNet])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("stage", [0, 1, 3])
def test_state_dict_is_that_of_the_plain_model(ranks, build, dtype, stage):
    """Names, order, shapes, dtypes and values, buffers included; bf16 computing does not round what was fp32."""
    for world in (1, 2):
        state = ranks(world).run(sharded_state, build, Plan(stage=stage, compute_dtype=dtype))[0]
        assert_equal(seeded(build).state_dict(), state)
        assert all(value.device.type == "cpu" for value in state.values())


def state_of_a_part():
    model = seeded(NestedNet)
    unwall.shard(model, FP32)
    return {name: value.clone() for name, value in model.stages[1].state_dict(prefix="part.").items()}


@pytest.mark.parametrize("world", [1, 2])
def test_state_dict_of_a_submodule(ranks, world):
    expected = seeded(NestedNet).stages[1].state_dict(prefix="part.")
    assert_equal(expected, ranks(world).run(state_of_a_part)[0])


def loaded_state(stage, missing):
    """Loads other values, trains a step on them, and shows both."""
    other = seeded(NestedNet, seed=7).state_dict()
    rank, world = rank_and_world()
    model = seeded(NestedNet)
    unwall.shard(model, Plan(stage=stage, compute_dtype=torch.float32))
    optimizer = unwall_adamw(model)
    if missing:
        del other["tail.0.bias"]
    answer = model.load_state_dict(other, strict=not missing)
    after = whole_state(model)
    mse(model, draw(CASE, 0, rank, world)).backward()
    optimizer.step()
    return after, whole_state(model), list(answer.missing_keys)


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_load_state_dict(ranks, stage, world):
    after, trained, missing = ranks(world).run(loaded_state, stage, False)[0]
    assert_equal(seeded(NestedNet, seed=7).state_dict(), after)
    assert missing == []
    assert_close(train_plain(Case(build=other_nested), world=world, steps=1).state, trained)


def other_nested():
    return seeded(NestedNet, seed=7)


@pytest.mark.parametrize("world", [1, 2])
def test_load_state_dict_that_is_not_complete(ranks, world):
    after, _, missing = ranks(world).run(loaded_state, 3, True)[0]
    assert missing == ["tail.0.bias"]
    assert_equal({"tail.0.bias": seeded(NestedNet).state_dict()["tail.0.bias"]}, {"tail.0.bias": after["tail.0.bias"]})


def test_load_state_dict_of_the_wrong_shape_names_the_parameter():
    model = NestedNet()
    unwall.shard(model, FP32)
    wrong = NestedNet().state_dict()
    wrong["tail.0.weight"] = torch.zeros(3, 3)
    with pytest.raises(RuntimeError, match=r"tail\.0\.weight"):
        model.load_state_dict(wrong)


def look_inside(stage):
    """What full_params shows, on every rank; then changes it and trains on."""
    rank, world = rank_and_world()
    model = seeded(NestedNet)
    plan = Plan(stage=stage, compute_dtype=torch.float32)
    shard_tight(model, plan) if stage == 3 and world > 1 else unwall.shard(model, plan)
    optimizer = unwall_adamw(model)
    with unwall.full_params(model):
        seen = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    with unwall.full_params(model.stages[0], write=True), torch.no_grad():
        for parameter in model.stages[0].parameters():
            parameter.mul_(0.5)
    written = whole_state(model)
    for step in range(3):
        mse(model, draw(CASE, step, rank, world)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return seen, written, whole_state(model)


def halved_nested():
    model = NestedNet()
    with torch.no_grad():
        for parameter in model.stages[0].parameters():
            parameter.mul_(0.5)
    return model


@WORLDS
@pytest.mark.parametrize("stage", [0, 1, 3])
def test_full_params(ranks, stage, world):
    results = ranks(world).run(look_inside, stage)
    start = dict(seeded(NestedNet).named_parameters())
    for seen, _, _ in results:
        assert_equal(start, seen)
    _, written, trained = results[0]
    assert_equal(seeded(halved_nested).state_dict(), written)
    assert_close(train_plain(Case(build=halved_nested), world=world, steps=3).state, trained)


def released():
    """Parameters outside of use under a small budget: shape, device and value."""
    model = seeded(NestedNet)
    shard_tight(model)
    return [(tuple(p.shape), p.numel(), p.device.type, p.detach().clone()) for p in model.parameters()]


def test_a_released_parameter_tells_its_shape_and_its_value(ranks):
    for facts in ranks(2).run(released):
        for (shape, numel, device, value), plain in zip(facts, seeded(NestedNet).parameters(), strict=True):
            assert (shape, numel, device) == (tuple(plain.shape), plain.numel(), "cpu")
            assert torch.equal(value, plain)


def gpt2():
    """Built by modules' own initialisation first, then rewritten by the model's ``_init_weights``; tied head."""
    config = transformers.GPT2Config(vocab_size=40, n_positions=16, n_embd=32, n_layer=2, n_head=2)
    return transformers.GPT2LMHeadModel(config)


def mixtral():
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.MixtralConfig(vocab_size=40, num_key_value_heads=1, num_local_experts=4, **sizes)
    return transformers.MixtralForCausalLM(config)


class LateNet(nn.Module):
    """Writes to parameters after they were built, reads them, and draws random numbers in between."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(16, 16)
        self.second = nn.Linear(16, 16)
        nn.init.orthogonal_(self.second.weight)
        with torch.no_grad():
            self.first.weight.copy_(self.second.weight.t() * 0.5 + torch.randn(16, 16))
            self.second.bias.zero_()
        self.third = nn.Parameter(self.first.weight.detach().clone())
        self.register_buffer("mean", self.first.weight.detach().mean(0))

    def forward(self, x):
        return self.second(self.first(x)) @ self.third + self.mean


def built_inside(build, dtype):
    plan = Plan(compute_dtype=dtype)
    torch.manual_seed(0)
    with unwall.init(plan):
        model = build()
    unwall.shard(model, plan)
    return whole_state(model), torch.rand(())


@pytest.mark.parametrize("build", [gpt2, mixtral, LateNet, NestedNet, NormNet, ScalarNet, TiedNet])
@WORLDS
def test_init_gives_the_values_of_a_plain_build(ranks, build, world):
    expected = seeded(build).state_dict()
    following = torch.rand(())
    results = ranks(world).run(built_inside, build, torch.float32)
    assert_equal(expected, results[0][0])
    assert all(torch.equal(after, following) for _, after in results)  # the generator is where a plain build leaves it


def test_init_keeps_fp32_values_when_computing_in_bf16(ranks):
    assert_equal(seeded(gpt2).state_dict(), ranks(2).run(built_inside, gpt2, torch.bfloat16)[0][0])


class Watched(nn.Sequential):
    """4 MiB per layer; notes the process's memory after each."""

    layers = 24

    def __init__(self):
        super().__init__()
        self.seen_bytes = []
        for _ in range(self.layers):
            self.append(nn.Linear(1024, 1024, bias=False))
            self.seen_bytes.append(resident_bytes())


def memory_while_building(inside):
    before = resident_bytes()
    if not inside:
        return max(Watched().seen_bytes) - before
    with unwall.init(FP32):
        model = Watched()
    return max(model.seen_bytes) - before


def test_a_model_built_inside_init_never_exists_whole(ranks):
    whole_bytes = Watched.layers * 1024 * 1024 * 4
    ranks(4).run(memory_while_building, True)  # what a process takes at its first model does not count
    for plain, ours in zip(*(ranks(4).run(memory_while_building, inside) for inside in (False, True)), strict=True):
        assert plain > 0.8 * whole_bytes  # what the measurement shows when it does
        assert ours < 0.5 * whole_bytes  # a quarter, the layer in the making, and what the allocator keeps


def trained_after_init():
    rank, world = rank_and_world()
    torch.manual_seed(0)
    with unwall.init(FP32):
        model = NestedNet()
    unwall.shard(model, FP32)
    return train(model, rank, world)


def train(model, rank, world):
    optimizer = unwall_adamw(model)
    for step in range(3):
        mse(model, draw(CASE, step, rank, world)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return whole_state(model)


@pytest.mark.parametrize("world", [1, 2])
def test_a_model_built_inside_init_trains(ranks, world):
    assert_close(train_plain(CASE, world=world, steps=3).state, ranks(world).run(trained_after_init)[0])


def train_from_meta(how, stage):
    rank, world = rank_and_world()
    with torch.device("meta"):
        model = NestedNet()
    unwall.shard(model, Plan(stage=stage, compute_dtype=torch.float32))
    if how == "load":
        model.load_state_dict(seeded(NestedNet).state_dict())
    else:
        with unwall.full_params(model, write=True), torch.no_grad():
            for name, parameter in seeded(NestedNet).named_parameters():
                model.get_parameter(name).copy_(parameter)
    return train(model, rank, world)


@pytest.mark.parametrize("how", ["load", "write"])
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("stage", [0, 3])
def test_a_model_from_the_meta_device(ranks, stage, world, how):
    assert_close(train_plain(CASE, world=world, steps=3).state, ranks(world).run(train_from_meta, how, stage)[0])
