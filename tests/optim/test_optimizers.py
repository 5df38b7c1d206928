"""Optimizers: param groups, schedulers, any element-wise optimizer, clipping, resuming."""

import functools
import gc
import io

import pytest
import torch
import torch.distributed as dist
from models import NestedNet, TiedNet, token_loss, tokens
from ranks import rank_and_world
from reference import (
    FP32,
    Case,
    assert_close,
    assert_equal,
    check_parity,
    draw,
    mse,
    plain_iteration,
    seeded,
    shard_tight,
    train_plain,
    unwall_adamw,
    whole_state,
)
from torch import nn

import unwall
from unwall.plans import Plan

CASE = Case(build=NestedNet)
TIED = Case(build=TiedNet, batch=tokens, loss=token_loss)
WORLDS = pytest.mark.parametrize(("world", "tight"), [(1, False), (2, True)], ids=["one-rank", "two-ranks"])


def groups(model):
    """Boundaries everywhere: matrices decay and vectors do not, within each Linear; the tail has its own rate."""
    tail = {id(parameter) for parameter in model.tail.parameters()}
    return [
        {"params": [p for p in model.parameters() if p.dim() >= 2 and id(p) not in tail], "weight_decay": 0.5},
        {"params": [p for p in model.parameters() if p.dim() < 2 and id(p) not in tail], "weight_decay": 0.0},
        {"params": [*model.tail.parameters()], "lr": 3e-2, "betas": (0.5, 0.9)},
    ]


def grouped_adamw(model):
    return torch.optim.AdamW(groups(model), lr=1e-2, eps=1e-3)


def grouped_unwall_adamw(model):
    return unwall.AdamW(groups(model), lr=1e-2, eps=1e-3)


@WORLDS
@pytest.mark.parametrize("stage", [1, 3])
def test_param_groups(ranks, stage, world, tight):
    plan = Plan(stage=stage, compute_dtype=torch.float32)
    check_parity(ranks(world), CASE, plan, optimizer=grouped_unwall_adamw, plain_optimizer=grouped_adamw, tight=tight)


def warm_up(optimizer):
    return torch.optim.lr_scheduler.LambdaLR(optimizer, [functools.partial(ramp, scale) for scale in (1.0, 0.5, 2.0)])


def ramp(scale, step):
    return scale * (step + 1) / 5


def one_cycle(optimizer):
    """Changes the betas as well as the rate."""
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=2e-2, total_steps=8)


@WORLDS
@pytest.mark.parametrize("scheduler", [warm_up, one_cycle])
def test_learning_rate_schedulers(ranks, scheduler, world, tight):
    options = {"optimizer": grouped_unwall_adamw, "plain_optimizer": grouped_adamw}
    check_parity(ranks(world), CASE, scheduler=scheduler, plain_scheduler=scheduler, tight=tight, **options)


class Lion(torch.optim.Optimizer):
    """As a user would write it."""

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.99), weight_decay=0.1):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            slow, fast = group["betas"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                momentum = self.state[parameter].setdefault("momentum", torch.zeros_like(parameter))
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.sub_(group["lr"] * (slow * momentum + (1 - slow) * parameter.grad).sign())
                momentum.mul_(fast).add_(parameter.grad, alpha=1 - fast)


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9, weight_decay=0.1)


def plain_sgd(model):
    return torch.optim.SGD(model.parameters(), lr=1e-2)


def adagrad(model):
    return torch.optim.Adagrad(model.parameters(), lr=1e-2, initial_accumulator_value=0.1, lr_decay=0.1)


def rmsprop(model):
    return torch.optim.RMSprop(model.parameters(), lr=1e-3, momentum=0.5, eps=1e-3)


def lion(model):
    return Lion(model.parameters())


def grouped_sgd(model):
    return torch.optim.SGD([{k: v for k, v in group.items() if k != "betas"} for group in groups(model)], lr=1e-2, momentum=0.9)


def wrapped(make, model, max_grad_norm=None):
    return unwall.wrap(make(model), max_grad_norm=max_grad_norm)


@WORLDS
@pytest.mark.parametrize("make", [sgd, plain_sgd, adagrad, rmsprop, lion, grouped_sgd])
def test_wrapped_optimizers(ranks, make, world, tight):
    check_parity(ranks(world), CASE, optimizer=functools.partial(wrapped, make), plain_optimizer=make, tight=tight)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_wrapped_optimizer_in_the_other_stages(ranks, stage):
    plan = Plan(stage=stage, compute_dtype=torch.float32)
    check_parity(ranks(2), TIED, plan, optimizer=functools.partial(wrapped, sgd), plain_optimizer=sgd)


@pytest.mark.parametrize("world", [1, 2])
def test_wrapped_optimizer_with_schedule_and_clipping(ranks, world):
    options = {"optimizer": functools.partial(wrapped, grouped_sgd, max_grad_norm=0.1), "scheduler": warm_up}
    plain = {"plain_optimizer": grouped_sgd, "plain_scheduler": warm_up, "plain_max_grad_norm": 0.1}
    got = check_parity(ranks(world), CASE, **options, **plain)
    expected = train_plain(CASE, world=world, optimizer=grouped_sgd, scheduler=warm_up, max_grad_norm=0.1)
    assert got[0].norms == pytest.approx(expected.norms, rel=1e-6)


def test_wrapped_optimizer_is_a_torch_optimizer():
    model = NestedNet()
    unwall.shard(model, FP32)
    optimizer = unwall.wrap(sgd(model))
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert isinstance(unwall_adamw(model), torch.optim.Optimizer)
    assert optimizer.param_groups[0]["momentum"] == 0.9


class RowScaled(torch.optim.Optimizer):
    """Divides by the norm of each row: what one element becomes depends on the shape and on its neighbours."""

    def __init__(self, params, lr=1e-2):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    rows = parameter.grad.norm(dim=-1, keepdim=True)
                    parameter.sub_(group["lr"] * parameter.grad / (rows + 1e-6))


@pytest.mark.parametrize("make", [torch.optim.LBFGS, torch.optim.Adafactor, RowScaled])
def test_an_optimizer_that_is_not_element_wise_is_refused(make):
    model = NestedNet()
    unwall.shard(model, FP32)
    with pytest.raises((ValueError, RuntimeError), match=f"{make.__name__}.*element"):
        unwall.wrap(make(model.parameters()))


def tail_only(model):
    return torch.optim.AdamW(model.tail.parameters(), lr=1e-2, eps=1e-3)


def unwall_tail_only(model):
    return unwall.AdamW(model.tail.parameters(), lr=1e-2, eps=1e-3)


@WORLDS
def test_an_optimizer_over_some_of_the_parameters(ranks, world, tight):
    """The others get gradients and stay as they are."""
    got = check_parity(ranks(world), CASE, optimizer=unwall_tail_only, plain_optimizer=tail_only, tight=tight)
    start = seeded(NestedNet).state_dict()
    for name, value in got[0].state.items():
        assert torch.equal(value, start[name]) != name.startswith("tail"), name


def growing(case, model, optimizer, batch, step, rank):
    """The first stage joins the training at step 2."""
    if step == 2:
        optimizer.add_param_group({"params": [*model.stages.parameters()], "lr": 2e-2})
    return plain_iteration(case, model, optimizer, batch, step, rank)


@WORLDS
def test_a_param_group_added_later(ranks, world, tight):
    case = Case(build=NestedNet, iterate=growing)
    check_parity(ranks(world), case, optimizer=unwall_tail_only, plain_optimizer=tail_only, tight=tight)


def clip_by_method(stage, max_norm, tight):
    """``optimizer.clip_grad_norm_`` in the loop, as many training loops have it."""
    rank, world = rank_and_world()
    model = seeded(NestedNet)
    plan = Plan(stage=stage, compute_dtype=torch.float32)
    shard_tight(model, plan) if tight else unwall.shard(model, plan)
    optimizer = unwall_adamw(model)
    norms = []
    for step in range(5):
        mse(model, draw(CASE, step, rank, world)).backward()
        norms.append(float(optimizer.clip_grad_norm_(max_norm)))
        optimizer.step()
        optimizer.zero_grad()
    return norms, whole_state(model)


@WORLDS
@pytest.mark.parametrize("stage", [0, 1, 3])
def test_clip_grad_norm_method(ranks, stage, world, tight):
    expected = train_plain(CASE, world=world, max_grad_norm=0.1)
    for norms, state in ranks(world).run(clip_by_method, stage, 0.1, tight and stage == 3):
        assert norms == pytest.approx(expected.norms, rel=1e-6)
        if state:  # whole on rank 0
            assert_close(expected.state, state)


def through_a_file(value):
    stream = io.BytesIO()
    torch.save(value, stream)
    stream.seek(0)
    return torch.load(stream)


def interrupted(plan, make, tight):
    """Six steps, and three steps, everything saved and loaded into a fresh model, and three more."""
    rank, world = rank_and_world()
    results = []
    for stop in (None, 3):
        model = seeded(NestedNet)
        shard_tight(model, plan) if tight else unwall.shard(model, plan)
        optimizer = make(model)
        scheduler = one_cycle(optimizer)
        for step in range(6):
            if step == stop:
                saved = [whole_state(model)]
                if world > 1:
                    dist.broadcast_object_list(saved, src=0)
                kept = through_a_file({"optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict()})
                assert set(kept["optimizer"]) >= {"state", "param_groups"}
                model = seeded(NestedNet, seed=99)
                shard_tight(model, plan) if tight else unwall.shard(model, plan)
                model.load_state_dict(saved[0])
                optimizer = make(model)
                scheduler = one_cycle(optimizer)
                optimizer.load_state_dict(kept["optimizer"])
                scheduler.load_state_dict(kept["scheduler"])
            inputs, target = draw(CASE, step, rank, world)
            mse(model, (inputs.to(plan.compute_dtype), target.to(plan.compute_dtype))).backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
        results.append(whole_state(model))
    return results


@WORLDS
@pytest.mark.parametrize("make", [grouped_unwall_adamw, functools.partial(wrapped, grouped_sgd)], ids=["adamw", "wrapped-sgd"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_resuming_from_state_dicts_is_identical_bit_by_bit(ranks, make, dtype, world, tight):
    through, resumed = ranks(world).run(interrupted, Plan(compute_dtype=dtype), make, tight)[0]
    assert_equal(through, resumed)


def two_optimizers(model):
    """One model, two optimizers: each steps its own part."""
    inner = [p for p in model.parameters() if id(p) not in {id(q) for q in model.tail.parameters()}]
    return unwall.AdamW(inner, lr=1e-2, eps=1e-3), unwall.wrap(torch.optim.SGD(model.tail.parameters(), lr=1e-2, momentum=0.9))


def train_with_two(make):
    rank, world = rank_and_world()
    model = seeded(NestedNet)
    if make is two_optimizers:
        unwall.shard(model, FP32)
    optimizers = make(model)
    for step in range(4):
        mse(model, draw(CASE, step, rank, world)).backward()
        for optimizer in optimizers:
            optimizer.step()
        for optimizer in optimizers:
            optimizer.zero_grad()
    return whole_state(model)


def two_plain_optimizers(model):
    inner = [p for p in model.parameters() if id(p) not in {id(q) for q in model.tail.parameters()}]
    return torch.optim.AdamW(inner, lr=1e-2, eps=1e-3), torch.optim.SGD(model.tail.parameters(), lr=1e-2, momentum=0.9)


def test_two_optimizers_on_one_model():
    assert_close(train_with_two(two_plain_optimizers), train_with_two(two_optimizers))


def test_optimizers_that_are_gone_leave_nothing_with_the_model():
    model = nn.Sequential(nn.Linear(16, 16))
    unwall.shard(model, Plan(params="host", optimizer="host"))
    for _ in range(5):
        optimizer = unwall.AdamW(model.parameters(), update_in_backward=True)
        del optimizer
        gc.collect()
    kept = unwall.AdamW(model.parameters())
    engine = unwall.api.engine(model)
    assert (len(engine.audience.listeners), len(engine.audience.guards)) == (1, 0)
    assert kept.param_groups


@pytest.mark.parametrize("make", [unwall_adamw, functools.partial(wrapped, rmsprop)], ids=["adamw", "wrapped-rmsprop"])
def test_loading_a_fresh_state_dict_forgets_what_was_learned(make):
    model = seeded(NestedNet)
    unwall.shard(model, FP32)
    optimizer = make(model)
    fresh = optimizer.state_dict()

    def first_step():
        model.load_state_dict(seeded(NestedNet).state_dict())
        optimizer.zero_grad()
        mse(model, draw(CASE, 0, 0, 1)).backward()
        optimizer.step()
        return whole_state(model)

    expected = first_step()
    first_step()
    optimizer.load_state_dict(fresh)
    assert_equal(expected, first_step())


@pytest.mark.parametrize("make", [unwall.AdamW, lambda params, lr: unwall.wrap(torch.optim.Adam(params, lr=lr))])
def test_states_under_other_names_are_taken_in_the_order_of_the_parameters(make):
    """As torch does: ``torch.distributed.checkpoint.state_dict`` gives them the names of the parameters."""
    model = NestedNet()
    unwall.shard(model, Plan(compute_dtype=torch.float32))
    first, second = make(model.parameters(), lr=1e-3), make(model.parameters(), lr=1e-3)
    for param in model.parameters():
        param.grad = torch.randn(param.shape)
    first.step()
    saved = first.state_dict()
    names = dict(enumerate(reversed(range(len(saved["state"])))))
    options = {**saved["param_groups"][0], "params": [names[number] for number in saved["param_groups"][0]["params"]]}
    second.load_state_dict({"state": {names[key]: entry for key, entry in saved["state"].items()}, "param_groups": [options]})
    for param in model.parameters():
        assert torch.equal(second.states(param)["exp_avg"], first.states(param)["exp_avg"])
    with pytest.raises(ValueError, match="has parameter other, but this optimizer has only"):
        second.load_state_dict({"state": {"other": {}}, "param_groups": [options]})
