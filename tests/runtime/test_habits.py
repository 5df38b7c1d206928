"""What people write around a model: transforms of torch.func, generation, parameters left alone, output dtypes."""

import copy
import functools
import pickle

import pytest
import torch
import transformers
from ranks import rank_and_world
from reference import FP32, assert_close, average_gradients, seeded, whole_state
from torch import nn
from torch.func import functional_call, grad, jvp, vmap

import unwall
from unwall.plans import Plan, PlanError

TIERS = {"device": {}, "host": {"params": "host", "optimizer": "host"}, "disk": {"params": "disk", "optimizer": "disk"}}


def chain():
    return nn.Sequential(*[layer for _ in range(6) for layer in (nn.Linear(64, 64), nn.Tanh())])


def own_values(model):
    """The functions of torch.func, with parameters of the caller's own."""
    values = {name: 2 * value.detach() for name, value in seeded(chain).named_parameters()}
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(1))

    def loss(values, x):
        return functional_call(model, values, (x,)).square().sum()

    yield functional_call(model, values, (x,))
    yield from grad(loss)(values, x).values()
    yield from vmap(grad(loss), in_dims=(None, 0))(values, x).values()


def model_values(model):
    """The same with the model's parameters."""
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(1))
    yield from jvp(model, (x,), (torch.ones_like(x),))
    yield vmap(model)(x)
    yield grad(lambda x: model(x).square().sum())(x)
    yield functional_call(model, dict(model.named_parameters()), (x,))


def transformed(fields, folder):
    model = seeded(chain)
    tight = {"device_bytes": 200_000} if "params" in fields else {}
    unwall.shard(model, Plan(compute_dtype=torch.float32, disk=folder, **fields, **tight))
    return [value.detach().clone() for make in (own_values, model_values) for value in make(model)]


@pytest.mark.filterwarnings("ignore:a tensor that shares memory")
@pytest.mark.parametrize(("world", "tier"), [(1, "device"), (1, "host"), (1, "disk"), (2, "device"), (2, "host")])
def test_torch_func(ranks, tmp_path, world, tier):
    got = ranks(world).run(transformed, TIERS[tier], tmp_path)
    plain = seeded(chain)
    expected = [value.detach() for make in (own_values, model_values) for value in make(plain)]
    for values in got:
        for one, other in zip(expected, values, strict=True):
            torch.testing.assert_close(other, one, rtol=1e-5, atol=1e-6)


def generated(tokens, fields):
    """What was generated, and how many elements or bytes were fetched for it."""
    shape = {"vocab_size": 48, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 2}
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape, num_key_value_heads=1)).eval()
    unwall.shard(model, Plan(compute_dtype=torch.float32, **fields))
    engine = unwall.api.engine(model)
    fetches = []
    for group in engine.groups:
        begin = group.begin_gather
        group.begin_gather = lambda begin=begin: (fetches.append(1), begin())
    ids = torch.arange(4)[None]
    out = model.generate(ids, max_new_tokens=tokens, do_sample=False, pad_token_id=0)
    return out.tolist(), len(fetches), len(engine.groups)


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("tier", ["device", "host"])
def test_generation_fetches_once_for_all_tokens_where_there_is_room(ranks, world, tier):
    for _, fetches, groups in ranks(world).run(generated, 12, TIERS[tier]):
        assert fetches <= groups


class Body(nn.Module):
    """A part that is left alone: one that computes in fp32, read as a module and as a bare parameter."""

    def __init__(self):
        super().__init__()
        self.first, self.router, self.last = nn.Linear(16, 16), nn.Linear(16, 4), nn.Linear(20, 16)
        self.scale = nn.Parameter(torch.ones(16))

    def forward(self, x):
        hidden = torch.tanh(self.first(x))
        return self.last(torch.cat([hidden, self.router(hidden)], 1)) * self.scale


def left_alone(name, _):
    return name.startswith("router") or name == "scale"


def data(step, rank):
    return torch.randn(4, 16, generator=torch.Generator().manual_seed(10 * step + rank))


def train_both(fields, folder):
    """The ignored part has a plain optimizer, and its gradients are averaged by hand."""
    rank, world = rank_and_world()
    model = seeded(Body, seed=rank)
    unwall.shard(model, Plan(ignore=left_alone, compute_dtype=torch.float32, disk=folder, **fields))
    alone = [param for name, param in model.named_parameters() if left_alone(name, param)]
    kept = [param for name, param in model.named_parameters() if not left_alone(name, param)]
    optimizers = [torch.optim.AdamW(alone, lr=1e-2), unwall.AdamW(kept, lr=1e-2)]
    with pytest.raises(ValueError, match=r"Plan\(ignore=\.\.\.\) leaves alone"):
        unwall.AdamW(model.parameters())
    for step in range(3):
        model(data(step, rank)).square().mean().backward()
        for param in alone:
            if world > 1:
                torch.distributed.all_reduce(param.grad)
            param.grad /= world
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    model.load_state_dict(state)
    return {**{name: value.detach().clone() for name, value in model.named_parameters() if left_alone(name, value)}, **state}


@pytest.mark.parametrize(("world", "tier"), [(1, "device"), (2, "host"), (2, "disk")])
def test_ignored_parameters_are_left_alone(ranks, tmp_path, world, tier):
    replicas = [seeded(Body) for _ in range(world)]
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-2) for model in replicas]
    for step in range(3):
        for rank, model in enumerate(replicas):
            model(data(step, rank)).square().mean().backward()
        average_gradients(replicas)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    every = ranks(world).run(train_both, TIERS[tier], tmp_path)
    expected = replicas[0].state_dict()
    assert_close(expected, {name: every[0][name] for name in expected})
    for got in every[1:]:
        assert_close({name: every[0][name] for name in got}, got)


def test_ignored_modules_compute_in_their_own_dtype():
    model = seeded(Body)
    unwall.shard(model, Plan(ignore=lambda name, _: name.startswith("router")))
    seen = []
    model.router.register_forward_hook(lambda module, args, out: seen.append((args[0].dtype, module.weight.dtype, out.dtype)))
    model(data(0, 0)).sum().backward()
    assert seen == [(torch.float32, torch.float32, torch.bfloat16)]
    assert model.router.weight.grad is not None


@pytest.mark.parametrize("compute", [torch.bfloat16, torch.float32])
def test_output_dtypes(compute):
    whole = seeded(Body)
    unwall.shard(whole, Plan(compute_dtype=compute, output_dtype=torch.float64))
    assert whole(data(0, 0)).dtype is torch.float64
    assert whole.first(data(0, 0)).dtype is compute
    parts = seeded(Body)
    wanted = {"first": torch.float32, "last": torch.float64}
    unwall.shard(parts, Plan(compute_dtype=compute, output_dtype=lambda name, _: wanted.get(name)))
    seen = {}
    for name in wanted:
        getattr(parts, name).register_forward_hook(lambda _, __, out, name=name: seen.update({name: out.dtype}))
    parts(data(0, 0)).sum().backward()
    assert seen == wanted
    with pytest.raises(PlanError, match="output_dtype"):
        Plan(output_dtype="fp32")
    with pytest.raises(PlanError, match="output_dtype gives"):
        unwall.shard(seeded(Body), Plan(output_dtype=lambda *_: "fp32"))


def fp8_over_ranks():
    model = nn.Linear(4, 4)
    model.scale = nn.Parameter(torch.arange(4.0).to(torch.float8_e4m3fn), requires_grad=False)
    unwall.shard(model, FP32)
    model(torch.ones(2, 4)).sum().backward()
    with unwall.full_params(model):
        seen = model.scale.float().tolist()
    return seen, {name: value.float() for name, value in whole_state(model).items()}


def test_a_frozen_fp8_parameter_over_ranks(ranks):
    for seen, _ in ranks(2).run(fp8_over_ranks):
        assert seen == [0, 1, 2, 3]


def with_optimizer(tier, folder, compute=torch.float32):
    model = seeded(chain)
    unwall.shard(model, Plan(compute_dtype=compute, disk=folder, **TIERS[tier]))
    return model, unwall.AdamW(model.parameters(), lr=0.01)


@pytest.mark.parametrize("tier", TIERS)
def test_hooks_on_parameters_that_come_after_shard_see_and_change_gradients(tmp_path, tier):
    model, optimizer = with_optimizer(tier, tmp_path)
    plain = seeded(chain)
    pairs = (model, optimizer), (plain, torch.optim.AdamW(plain.parameters(), lr=0.01))
    seen = {}

    def clamp(net, param):
        seen[net].append(float(param.grad.norm()))
        param.grad.clamp_(-1e-3, 1e-3)

    for net, _ in pairs:
        seen[net] = []
        net[0].weight.register_hook(lambda grad: grad * 0.5)
        net[2].weight.register_post_accumulate_grad_hook(functools.partial(clamp, net))
    for net, update in pairs:
        for step in range(2):
            net(torch.randn(3, 64, generator=torch.Generator().manual_seed(step))).square().sum().backward()
            update.step()
            update.zero_grad()
    assert seen[model] == pytest.approx(seen[plain])
    assert_close(plain.state_dict(), model.state_dict())


@pytest.mark.parametrize("tier", TIERS)
def test_parameters_are_read_and_written_in_inference_mode(tmp_path, tier):
    model, _ = with_optimizer(tier, tmp_path)
    before = seeded(chain)[0].weight.detach()
    with torch.inference_mode():
        assert torch.equal(model[0].weight * 1, before)
        model[0].weight.mul_(2)
        assert model(torch.ones(1, 64)).is_inference()
    assert torch.equal(model.state_dict()["0.weight"], 2 * before)


def test_what_cannot_be_done_says_what_to_write(tmp_path):
    model, optimizer = with_optimizer("host", tmp_path)
    model(torch.ones(1, 64)).sum().backward()
    optimizer.step()
    with pytest.raises(KeyError, match=r"Write optimizer\.states\(param\)\['exp_avg'\]"):
        optimizer.state[model[0].weight]["exp_avg"]
    for copied in (copy.deepcopy, pickle.dumps):
        with pytest.raises(RuntimeError, match=r"optimizer\.state_dict\(\)"):
            copied(optimizer)
    with pytest.raises(RuntimeError, match=r"nn\.Parameter\(p\.detach\(\)\.clone\(\)\)"):
        nn.Parameter(model[0].weight)
    with pytest.raises(RuntimeError, match=r"before unwall\.shard"):
        nn.utils.parametrizations.weight_norm(model[0])


@pytest.mark.parametrize("tier", ["device", "host", "disk"])
def test_functional_calls_with_fp32_values_compute_as_the_model_does(tmp_path, tier):
    model, _ = with_optimizer(tier, tmp_path, compute=torch.bfloat16)
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(1))
    values = {name: param.detach().clone().requires_grad_() for name, param in model.named_parameters()}
    result = torch.func.functional_call(model, values, (x,))
    assert torch.equal(result, model(x))
    assert {value.dtype for value in values.values()} == {torch.float32}
    result.float().sum().backward()
    model(x).float().sum().backward()
    for name, param in model.named_parameters():
        torch.testing.assert_close(values[name].grad, param.grad.float(), rtol=0.02, atol=0.02)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("after", [True, False])
@pytest.mark.parametrize("field", ["keep_fp32", "ignore"])
def test_parametrizations_that_stay_in_fp32(field, after, bias):
    """Their buffers are fp32: with a weight in bf16 torch would raise."""

    def build():
        return nn.Sequential(nn.Linear(8, 8, bias=bias), nn.Linear(8, 8))

    model, plain = seeded(build), seeded(build)
    plan = Plan(**{field: lambda name, _: name.startswith("0.")})
    for part in (model, plain):
        if part is model and after:
            unwall.shard(model, plan)
        torch.manual_seed(1)
        nn.utils.parametrizations.spectral_norm(part[0])
        if part is model and not after:
            unwall.shard(model, plan)
    x = torch.randn(3, 8, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(model(x).float(), plain(x), rtol=0.03, atol=0.03)
    model(x).float().sum().backward()
