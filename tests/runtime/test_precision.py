"""bf16 and fp16 with an fp32 master, against the same in plain PyTorch."""

import functools

import pytest
import torch
import torch.nn.functional as F
from mixed import nearest, train_mixed
from ranks import rank_and_world
from reference import (
    Case,
    assert_close,
    assert_equal,
    assert_losses,
    draw,
    plain_iteration,
    seeded,
    train_unwall,
    unwall_adamw,
    whole_state,
)
from torch import nn

import unwall
from unwall.plans import Plan

VOCABULARY, WIDTH = 32, 16
BF16, FP16 = torch.bfloat16, torch.float16
DTYPES = (BF16, torch.float32, FP16, torch.float64)


class Router(nn.Module):
    """Computes in the precision of its own weight, and goes back to that of its input."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 4)
        self.seen = set()

    def forward(self, x):
        self.seen.add(self.weight.dtype)
        return torch.softmax(x.to(self.weight.dtype) @ self.weight, dim=-1).to(x.dtype)


class HalfNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        self.router = Router()
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens):
        x = self.embed(tokens)
        x = x + self.down(F.gelu(self.up(x)))
        return self.head(x * self.router(x))


class SeveralNet(nn.Module):
    """Parameters of several dtypes as a user may bring them; its forward casts as it has to in plain PyTorch too."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.parts = nn.ModuleList(nn.Linear(WIDTH, WIDTH).to(dtype) for dtype in DTYPES)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens):
        x = self.embed(tokens)
        for part in self.parts:
            x = torch.tanh(part(x.to(part.weight.dtype)))
        return self.head(x.to(self.head.weight.dtype))


def tokens():
    return torch.randint(VOCABULARY, (4, 8)), torch.randint(VOCABULARY, (4, 8))


def token_loss(model, batch):
    inputs, target = batch
    return F.cross_entropy(model(inputs).float().flatten(0, 1), target.flatten())


def is_router(name, parameter):
    return name.startswith("router")


CASE = Case(build=HalfNet, batch=tokens, loss=token_loss)


def check_steps(pool, plan, case=CASE, tight=False, optimizer=unwall_adamw, **options):
    """Each step of unwall is a step of the plain reference, from where it started."""
    got = pool.run(train_unwall, case, plan, optimizer=optimizer, tight=tight, record=True)
    settings = {"dtype": plan.compute_dtype, "reduce_dtype": plan.reduce_dtype, "keep_fp32": plan.keep_fp32, **options}
    expected = train_mixed(case, world=pool.world_size, follow=got[0].states, **settings)
    assert_losses(expected.losses, got)
    for theirs, ours in zip(expected.states, got[0].states, strict=True):
        assert_close(theirs, ours)  # names, shapes and dtypes too: what a state_dict shows is the fp32 master
    return expected, got


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("world", [1, 2])
def test_bf16_with_an_fp32_master(ranks, stage, world):
    check_steps(ranks(world), Plan(stage=stage))  # bf16 is the default


@pytest.mark.parametrize("world", [2, 4])
def test_bf16_stages_and_streaming_are_identical_bit_by_bit(ranks, world):
    runs = [ranks(world).run(train_unwall, CASE, Plan(stage=stage))[0] for stage in (0, 1, 2, 3)]
    runs.append(ranks(world).run(train_unwall, CASE, Plan(stage=3), tight=True)[0])
    for run in runs[1:]:
        assert_equal(run.state, runs[0].state)


def several_backwards(case, model, optimizer, batch, step, rank):
    """Gradients come in more than once before the step: from one forward twice, and from another one."""
    inputs, target = batch
    loss = case.loss(model, (inputs[:2], target[:2]))
    loss.backward(retain_graph=True)
    loss.backward()
    case.loss(model, (inputs[2:], target[2:])).backward()
    return loss.detach()


def test_bf16_accumulation_is_identical_bit_by_bit(ranks):
    """Also under the smallest budget that was accepted: it must hold what accumulating takes."""
    case = Case(build=HalfNet, batch=tokens, loss=token_loss, iterate=several_backwards)
    whole = ranks(2).run(train_unwall, case, Plan(stage=0))[0]
    for plan, tight in ((Plan(stage=2), False), (Plan(stage=3), False), (Plan(stage=3), True)):
        assert_equal(whole.state, ranks(2).run(train_unwall, case, plan, tight=tight)[0].state)


def test_the_master_keeps_what_bf16_cannot_hold(ranks):
    """Many steps, each far below half a bf16 step of the weight, add up."""
    [run] = ranks(1).run(train_unwall, CASE, Plan(), optimizer=tiny_steps, steps=20)
    start = seeded(HalfNet).state_dict()
    moved = (run.state["head.weight"] - start["head.weight"]).abs()
    assert (run.state["head.weight"].bfloat16() == start["head.weight"].bfloat16()).float().mean() > 0.9
    assert moved.median() > 1e-6  # where a step of bf16 is 5e-4


def tiny_steps(model):
    return unwall.AdamW(model.parameters(), lr=1e-6, weight_decay=0.0)


@pytest.mark.parametrize("world", [1, 2])
def test_bf16_clipping(ranks, world):
    clipped = functools.partial(unwall_adamw, max_grad_norm=0.05)
    expected, got = check_steps(ranks(world), Plan(), optimizer=clipped, max_grad_norm=0.05)
    assert min(expected.norms) > 0.05
    assert got[0].norms == pytest.approx(expected.norms, rel=1e-6)


def test_gradients_summed_in_fp32(ranks):
    """Four ranks: in bf16 the sum loses bits, in fp32 it does not."""
    check_steps(ranks(4), Plan(reduce_dtype=torch.float32))
    with pytest.raises(AssertionError, match="limit"):
        check_steps(ranks(4), Plan(), reduce_dtype=torch.float32)


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("world", [1, 2])
def test_parameters_kept_in_fp32(ranks, stage, world):
    plan = Plan(stage=stage, keep_fp32=is_router, reduce_dtype=torch.float32)
    check_steps(ranks(world), plan, tight=stage == 3 and world == 2)


@pytest.mark.parametrize(("keep", "dtype"), [(None, BF16), (is_router, torch.float32)])
def test_the_dtype_that_a_module_computes_in(keep, dtype):
    model = seeded(HalfNet)
    unwall.shard(model, Plan(keep_fp32=keep))
    token_loss(model, tokens()).backward()
    assert model.router.seen == {dtype}
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}  # outside a pass: what they were given in


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_parameters_of_several_dtypes(ranks, dtype, world):
    """What is not fp32 is computed in its own dtype, has an fp32 master all the same, and is given back as precise as that."""
    case = Case(build=SeveralNet, batch=tokens, loss=token_loss)
    expected = train_mixed(case, dtype=dtype, world=world)
    got = ranks(world).run(train_unwall, case, Plan(compute_dtype=dtype))
    original = SeveralNet().state_dict()
    for name, value in got[0].state.items():
        given = original[name].dtype
        assert value.dtype == (torch.float32 if given in (BF16, FP16) else given)
        if given in (BF16, FP16):  # the same but for the last bit of a master that decides about rounding, which is rare
            assert (value.to(given) == nearest(expected.state[name], given)).float().mean() > 0.98, name
        elif dtype == torch.float32:
            assert_close({name: expected.state[name]}, {name: value}, rel=1e-5)


def train_fp16(plan, steps, max_grad_norm):
    """The scale of each step, and the parameters before and after each. Step 2 overflows, on rank 0 only."""
    rank, world = rank_and_world()
    model = seeded(HalfNet)
    unwall.shard(model, plan)
    optimizer = unwall_adamw(model, max_grad_norm=max_grad_norm)
    scales, states = [], [whole_state(model)]
    for step in range(steps):
        loss = token_loss(model, draw(CASE, step, rank, world))
        scales.append(float(optimizer.scale(torch.ones(()))))
        optimizer.scale(loss * (1e30 if step == 2 and rank == 0 else 1.0)).backward()
        optimizer.step()
        optimizer.zero_grad()
        states.append(whole_state(model))
    return scales, states


@pytest.mark.parametrize("max_grad_norm", [None, 0.05])
@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("world", [1, 2])
def test_fp16_with_dynamic_loss_scaling(ranks, stage, world, max_grad_norm):
    results = ranks(world).run(train_fp16, Plan(stage=stage, compute_dtype=FP16), 6, max_grad_norm)
    scales, states = results[0]
    assert all(other == scales for other, _ in results)  # all ranks agree, though only rank 0 overflowed
    assert scales[0] > 1
    assert_equal(states[2], states[3])  # the step that overflowed was left out
    assert scales[3] < scales[2]
    assert not torch.equal(states[3]["up.weight"], states[4]["up.weight"])  # and the next one counted
    # The reference leaves step 2 out too: an infinite scale makes its gradients overflow.
    settings = {"scales": [*scales[:2], float("inf"), *scales[3:]], "max_grad_norm": max_grad_norm, "follow": states}
    expected = train_mixed(CASE, dtype=FP16, world=world, steps=6, **settings)
    for theirs, ours in zip(expected.states, states, strict=True):
        assert_close(theirs, ours)


def scaled(case, model, optimizer, batch, step, rank):
    loss = case.loss(model, batch)
    optimizer.scale(loss).backward()
    return loss.detach()


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_one_training_loop_for_all_precisions(dtype):
    """``optimizer.scale`` may stay in the loop where it is not needed."""
    with_scale, without = (
        train_unwall(Case(build=HalfNet, batch=tokens, loss=token_loss, iterate=iterate), Plan(compute_dtype=dtype))
        for iterate in (scaled, plain_iteration)
    )
    assert_close(without.state, with_scale.state)


class FloatNet(nn.Module):
    """Float inputs: the model computes in bf16 without a cast in the training loop."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))

    def forward(self, x, scale):
        self.seen = x.dtype
        return self.body(x) * scale


def test_float_inputs_are_cast_to_the_compute_dtype():
    model = FloatNet()
    unwall.shard(model, Plan())
    model(torch.randn(2, WIDTH), scale=torch.tensor(2.0)).sum().backward()
    assert model.seen == BF16
