"""``param.grad`` between backward and step: torch's own functions, and changes by hand, against plain PyTorch."""

import math
import tempfile
from contextlib import nullcontext

import pytest
import torch
from ranks import rank_and_world
from torch import nn

import unwall
from unwall.plans import Plan
from unwall.shards.control import DivergedError

PLACEMENTS = {
    "device": {"params": "device", "optimizer": "device"},
    "host": {"params": "host", "optimizer": "host"},
    "disk": {"params": "disk", "optimizer": "disk"},
}


class Net(nn.Module):
    """Large and small parameters, a scalar, and one that has no gradient."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(16, 96), nn.GELU(), nn.Linear(96, 64), nn.GELU(), nn.Linear(64, 8))
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, x):
        return self.body(x) * self.scale


def build():
    torch.manual_seed(0)
    return Net()


def sharded(plan, dtype=torch.float32, **options):
    model = build()
    if "disk" in plan.values():
        plan = {**plan, "disk": tempfile.mkdtemp()}
    unwall.shard(model, Plan(compute_dtype=dtype, **plan, **options))
    return model


def inputs(step, rank):
    torch.manual_seed(100 * step + rank)
    return torch.randn(4, 16)


def backward(model, step, rank=0, scale=1.0):
    (model(inputs(step, rank)).float().square().mean() * scale).backward()


def clip_norm(params):
    return nn.utils.clip_grad_norm_(params, 0.05)


def clip_norm_far_away(params):
    return nn.utils.clip_grad_norm_(params, 1e6)


def clip_maximum(params):
    return nn.utils.clip_grad_norm_(params, 0.01, norm_type=math.inf, foreach=True)


def clip_value(params):
    nn.utils.clip_grad_value_(params, 0.002)


def clip_value_foreach(params):
    nn.utils.clip_grad_value_(params, 0.001, foreach=True)


def clip_in_two_calls(params):
    norm = nn.utils.get_total_norm([p.grad for p in params if p.grad is not None])
    nn.utils.clip_grads_with_norm_(params, 0.02, norm)
    return norm


def change_in_place(params):
    for p in params:
        if p.grad is not None and p.dim() > 1:
            p.grad.mul_(0.5).add_(p.detach().abs().mul(0).add(0.01).to(p.grad.dtype))
            p.grad[0] += 1
            p.grad.data.view(-1)[3] = -2.0
            p.grad.t()[1:3].neg_()
            assert bool(torch.isfinite(p.grad).all())


def set_anew(params):
    for p in params:
        if p.grad is not None:
            p.grad = p.grad * 2
    params[-1].grad = torch.full_like(params[-1].grad, 0.25)


def forget_some(params):
    params[0].grad = None
    params[3].grad = None


def log(params):
    return torch.stack([p.grad.abs().mean() + p.grad.float().norm() for p in params if p.grad is not None]).sum()


CHANGES = [
    clip_norm,
    clip_norm_far_away,
    clip_maximum,
    clip_value,
    clip_value_foreach,
    clip_in_two_calls,
    change_in_place,
    set_anew,
    forget_some,
    log,
]


def follow(plan, dtype, stage):
    """One step after each change, beside the same change and step in plain PyTorch. Gives what differs."""
    rank, world = rank_and_world()
    model = sharded(PLACEMENTS[plan], dtype, stage=stage)
    optimizer = unwall.AdamW(model.parameters(), lr=1e-2)
    masters = [nn.Parameter(value) for value in values(model, optimizer)]
    plain = torch.optim.AdamW(masters, lr=1e-2)
    rel, wrong = 1e-6 if world == 1 or dtype is torch.float32 else 1e-2, []
    for step, change in enumerate(CHANGES):
        backward(model, step, rank)
        params = list(model.parameters())
        grads = [None if p.grad is None else p.grad.clone() for p in params]
        assert [grad is None for grad in grads] == [name == "unused" for name, _ in model.named_parameters()]
        if dtype is torch.float32 and step == 0:
            wrong += [f"gradient {at}" for at, (a, b) in enumerate(zip(grads, averaged(world), strict=True)) if not near(a, b)]
        dtypes = [p.dtype if grad is None else grad.dtype for p, grad in zip(params, grads, strict=True)]
        twins = [nn.Parameter(p.detach().to(kind, copy=True)) for p, kind in zip(params, dtypes, strict=True)]
        for twin, grad in zip(twins, grads, strict=True):
            twin.grad = grad
        said, expected = change(params[:-1]), change(twins[:-1])
        if said is not None and not near(said, expected, rel):
            wrong.append(f"{change.__name__}: {said}, plain PyTorch {expected}")
        for at, (p, twin, master) in enumerate(zip(params, twins, masters, strict=True)):
            if not near(None if p.grad is None else p.grad.clone(), twin.grad, rel):
                wrong.append(f"{change.__name__}: the gradient of parameter {at}")
            master.grad = None if twin.grad is None else twin.grad.float()
        optimizer.step()
        plain.step()
        assert all(p.grad is None for p in params)
        for at, (mine, master) in enumerate(zip(values(model, optimizer), masters, strict=True)):
            if not near(mine, master, max(rel, 1e-5)):
                wrong.append(f"{change.__name__}: parameter {at} after the step")
            master.data = mine
    return wrong


def values(model, optimizer):
    return [optimizer.states(p)["master"].float() for p in model.parameters()]


def averaged(world):
    """The gradients of plain PyTorch, averaged over the ranks."""
    total = None
    for rank in range(world):
        replica = build()
        backward(replica, 0, rank)
        grads = [p.grad for p in replica.parameters()]
        total = grads if total is None else [a if a is None else a + b for a, b in zip(total, grads, strict=True)]
    return [grad if grad is None else grad / world for grad in total]


def near(got, expected, rel=1e-5):
    if got is None or expected is None:
        return got is expected
    difference = float((got.double() - expected.detach().double()).norm())
    return difference <= rel * float(expected.detach().double().norm()) + 1e-30


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("plan", PLACEMENTS)
@pytest.mark.parametrize(("world", "stage"), [(1, 3), (2, 3), (2, 0)])
def test_what_torch_does_to_gradients(ranks, world, stage, plan, dtype):
    for wrong in ranks(world).run(follow, plan, dtype, stage):
        assert wrong == []


def loops(kind, plan):
    """Loops that do not look like the usual one. Gives the state after them."""
    rank, world = rank_and_world()
    model = sharded(PLACEMENTS[plan]) if plan else build()
    adamw = unwall.AdamW if plan else torch.optim.AdamW
    optimizer = adamw(model.parameters(), lr=1e-2)
    for step in range(3):
        globals()[kind](model, optimizer, step, rank if plan else None, world)
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def losses(model, step, rank, world):
    """One backward with this rank's batch; in plain PyTorch with all of them."""
    every = range(world) if rank is None else [rank]
    return sum(model(inputs(step, one)).square().mean() for one in every) / len(every)


def cleared_by_hand(model, optimizer, step, rank, world):
    losses(model, 10 + step, rank, world).backward()
    loss = losses(model, step, rank, world)
    for p in model.parameters():
        p.grad = None
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def clipped_before_another_backward(model, optimizer, step, rank, world):
    losses(model, 10 + step, rank, world).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.05)
    losses(model, step, rank, world).backward()
    optimizer.step()
    model.zero_grad()


def zeros_count(model, optimizer, step, rank, world):
    """A parameter without a gradient in this backward is decayed, because its gradient is zero and not None."""
    if step == 0:
        losses(model, step, rank, world).backward()
    else:
        losses(model.body, step, rank, world).backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    assert float(model.scale.grad) == 0.0
    assert model.unused.grad is None
    if step == 1:
        model.zero_grad(set_to_none=False)
        assert float(model.body[0].weight.grad.abs().sum()) == 0.0
        assert float(model.body[0].weight.grad.norm()) == 0.0


def cleared_is_no_zero(model, optimizer, step, rank, world):
    """What the user has set to None stays None."""
    losses(model, step, rank, world).backward()
    if step:
        model.scale.grad = None
        (model if step == 1 else optimizer).zero_grad(set_to_none=False)
        assert model.scale.grad is None
        assert float(model.body[0].weight.grad.abs().sum()) == 0.0
    optimizer.step()
    optimizer.zero_grad()


def given_by_autograd_grad(model, optimizer, step, rank, world):
    params = [p for p in model.parameters() if p is not model.unused]
    grads = torch.autograd.grad(losses(model, step, None, world), params)
    assert all(p.grad is None for p in params)
    for p, grad in zip(params, grads, strict=True):
        p.grad = grad
    optimizer.step()
    optimizer.zero_grad()


def some_inputs_only(model, optimizer, step, rank, world):
    losses(model, step, rank, world).backward(inputs=[model.body[2].weight, model.scale])
    assert [name for name, p in model.named_parameters() if p.grad is not None] == ["scale", "body.2.weight"]
    optimizer.step()
    optimizer.zero_grad()


LOOPS = [
    cleared_by_hand,
    clipped_before_another_backward,
    zeros_count,
    cleared_is_no_zero,
    given_by_autograd_grad,
    some_inputs_only,
]


@pytest.mark.parametrize("plan", PLACEMENTS)
@pytest.mark.parametrize("world", [1, 2])
def test_loops_that_set_grad(ranks, world, plan):
    for kind in LOOPS:
        got = ranks(world).run(loops, kind.__name__, plan)[0]
        expected = ranks(world).run(loops, kind.__name__, None)[0]
        assert [name for name in expected if not near(got[name], expected[name])] == [], kind.__name__


def scaled(plan, dtype):
    """torch's GradScaler, with clipping, and a step that overflows."""
    rank, _ = rank_and_world()
    model = sharded(PLACEMENTS[plan], dtype) if plan else build()
    adamw = unwall.AdamW if plan else torch.optim.AdamW
    optimizer = adamw(model.parameters(), lr=1e-2, eps=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    scales, norms = [], []
    for step in range(5):
        loss = model(inputs(step, rank)).float().square().mean()
        if step == 2 and rank == 0:
            loss = loss * math.inf
        scaler.scale(loss).backward()
        if step != 1:
            scaler.unscale_(optimizer)
            norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.05)))
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
    return scales, norms, {name: value.detach().clone() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("plan", PLACEMENTS)
def test_the_grad_scaler_of_torch(ranks, plan, dtype):
    scales, norms, state = scaled(plan, dtype)
    expected_scales, expected_norms, expected = scaled(None, torch.float32)
    assert scales == expected_scales == [2.0**10, 2.0**11, 2.0**10, 2.0**10, 2.0**11]
    rel = 1e-5 if dtype is torch.float32 else 3e-2
    kept = [(a, b) for a, b in zip(norms, expected_norms, strict=True) if math.isfinite(b)]
    assert all(abs(a - b) <= rel * b for a, b in kept)
    assert [name for name in expected if not near(state[name], expected[name], rel)] == []
    assert {tuple(one[0]) for one in ranks(2).run(scaled, plan, dtype)} == {tuple(expected_scales)}


def not_the_same(kind):
    """One rank does something else to its gradients than the other. Gives what each of them is told."""
    rank, _ = rank_and_world()
    model = sharded(PLACEMENTS["host"])
    optimizer = unwall.AdamW(model.parameters(), lr=1e-2)
    backward(model, 0, rank)
    weight = model.body[0].weight
    if kind == "other values":
        weight.grad = torch.full_like(weight, 1.0 + rank)
    elif kind == "only one sets" and rank == 0:
        weight.grad = torch.ones_like(weight)
    elif kind == "only one reads" and rank == 0:
        try:
            weight.grad.sum()
        except DivergedError as error:
            return str(error)
    try:
        optimizer.step()
        backward(model, 1, rank)
    except (ValueError, DivergedError) as error:
        return str(error)
    return "nothing"


@pytest.mark.parametrize(
    ("kind", "match"),
    [("other values", "body.0.weight was set by hand"), ("only one sets", "same point"), ("only one reads", "same point")],
)
def test_ranks_that_differ_are_told(ranks, kind, match):
    assert all(match in told for told in ranks(2).run(not_the_same, kind))


def set_like_a_small_parameter():
    """What is made like an absent parameter of one element has a stride of 0."""
    model = nn.Linear(1, 1)
    unwall.shard(model, Plan(compute_dtype=torch.float32))
    optimizer = unwall.AdamW(model.parameters(), lr=0.5, weight_decay=0.0)
    model.load_state_dict({"weight": torch.zeros(()).expand(1, 1), "bias": torch.zeros(()).expand(1)})
    model(torch.ones(2, 1)).sum().backward()
    for param in model.parameters():
        param.grad = torch.full_like(param, 0.5)
    optimizer.step()
    return {name: value.item() for name, value in model.state_dict().items() if value.numel() == 1}


def test_a_gradient_of_one_element_is_set_on_two_ranks(ranks):
    assert ranks(2).run(set_like_a_small_parameter)[0] == {"weight": pytest.approx(-0.5), "bias": pytest.approx(-0.5)}


def summed(op, dtype):
    rank, _ = rank_and_world()
    model = sharded(PLACEMENTS["host"], dtype, reduce_op=op)
    backward(model, 0, rank)
    return {name: grad.float() for name, grad in unwall.grads(model).items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_sum_instead_of_the_mean(ranks, dtype):
    mean, total = (ranks(2).run(summed, op, dtype)[1] for op in ("mean", "sum"))
    assert list(total) == [name for name, _ in build().named_parameters() if name != "unused"]
    assert all(near(total[name], 2 * mean[name], 1e-2 if dtype is torch.float16 else 1e-6) for name in mean)


def test_a_gradient_that_is_gone_says_so():
    model = sharded(PLACEMENTS["host"])
    optimizer = unwall.AdamW(model.parameters(), lr=1e-2)
    backward(model, 0)
    kept, copied = model.scale.grad, model.scale.grad.clone()
    view = kept.view(1)
    optimizer.step()
    backward(model, 1)
    for old in (kept, view):
        with pytest.raises(RuntimeError, match="this gradient is gone"):
            old.norm()
    assert model.scale.grad is not kept
    assert float(model.scale.grad) != float(copied)


def test_gradients_used_in_backward_cannot_be_changed():
    model = sharded(PLACEMENTS["host"])
    optimizer = unwall.AdamW(model.parameters(), lr=1e-2, update_in_backward=True)
    backward(model, 0)
    model.scale.grad.norm()
    with pytest.raises(RuntimeError, match="update_in_backward=True has updated"):
        nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    optimizer.step()


def test_printing_and_converting():
    model = sharded(PLACEMENTS["disk"])
    backward(model, 0)
    plain = build()
    backward(plain, 0)
    grad, expected = model.body[4].bias.grad, plain.body[4].bias.grad
    assert repr(grad).startswith("tensor([")
    assert torch.allclose(torch.tensor(grad.tolist()), expected)
    assert torch.allclose(torch.from_numpy(grad.numpy()), expected)
    assert torch.allclose(grad.cpu().double(), expected.double())
    assert torch.allclose(expected.clone().copy_(grad), expected)
    assert [tuple(part.shape) for part in grad.split(4)] == [(4,), (4,)]


def test_a_gradient_made_like_its_parameter():
    """Outside a pass a parameter has the dtype it was given in, fp32 here, whatever the model computes in."""
    model = sharded(PLACEMENTS["device"], torch.bfloat16)
    optimizer = unwall.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    before = {name: param.detach().clone() for name, param in model.named_parameters()}
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    for name, param in model.named_parameters():
        torch.testing.assert_close(param.detach(), before[name] - 1e-2, rtol=0, atol=1e-6, msg=name)


class TwoLayers(nn.Module):
    """Rank 1 uses the first one only. Nobody is rank 2, which uses none."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(16, 128), nn.Linear(128, 64)

    def forward(self, x, rank):
        x = self.first(x) if rank < 2 else x
        return (self.second(x) if rank == 0 else x).square().mean()


def forget_second(params):
    for p in params[2:]:
        p.grad = None


def kept_on_one_rank(change):
    """What ``no_sync`` has left on rank 0 alone, changed through ``.grad``. Parameters, and those of plain PyTorch."""
    rank, found = rank_and_world()[0], []
    for plain in (False, True):
        model = TwoLayers()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        if plain:
            (sum(model(inputs(0, one), one) for one in range(2)) / 2).backward()
        else:
            unwall.shard(model, Plan(compute_dtype=torch.float32))
            optimizer = unwall.wrap(optimizer)
            with unwall.no_sync(model):
                model(inputs(0, rank), rank).backward()
        if change is not None:
            change(list(model.parameters()))
        optimizer.step()
        with nullcontext() if plain else unwall.full_params(model):
            found.append([param.detach().clone() for param in model.parameters()])
    return all(torch.allclose(one, other, rtol=1e-5, atol=1e-7) for one, other in zip(*found, strict=True))


@pytest.mark.parametrize("change", [None, clip_norm, clip_value, change_in_place, log, forget_second])
def test_gradients_that_no_sync_left_on_one_rank(ranks, change):
    assert ranks(2).run(kept_on_one_rank, change) == [True, True]


def cleared_where_no_sync_left_it(set_to_none):
    model = unwall.shard(TwoLayers(), Plan(compute_dtype=torch.float32))
    optimizer = unwall.AdamW(model.parameters(), lr=1.0, weight_decay=0.0)
    before = [param.detach().clone() for param in model.parameters()]
    rank, _ = rank_and_world()
    with unwall.no_sync(model):
        model(inputs(0, rank), rank).backward()
    shown = [param.grad is not None for param in model.parameters()]
    optimizer.zero_grad(set_to_none)
    left = [param.grad is None for param in model.parameters()]
    optimizer.step()
    return shown, left, all(torch.equal(*pair) for pair in zip(before, model.parameters(), strict=True))


@pytest.mark.parametrize("set_to_none", [True, False])
def test_what_no_sync_left_on_one_rank_is_forgotten(ranks, set_to_none):
    assert ranks(2).run(cleared_where_no_sync_left_it, set_to_none) == [([True] * 4, [set_to_none] * 4, True)] * 2


def fail(_):
    raise ValueError("in backward")


def a_backward_fails(model, optimizer):
    """On rank 0, after one that went well. All is tried again."""
    rank, _ = rank_and_world()
    model(inputs(0, rank), rank).backward()
    x = inputs(1, rank).requires_grad_()
    if rank == 0:
        x.register_hook(fail)
    with pytest.raises((ValueError, unwall.PeerError)):
        model(x, rank).backward()
    optimizer.zero_grad()


def set_to_ones(params):
    for p in params:
        p.grad = torch.ones_like(p)


def set_to_none(params):
    for p in params:
        p.grad = None


def two_backwards(first, between, users):
    """Before a step, with a change of ``.grad`` ``between``. ``users``: how each rank uses the model in the second one."""
    rank, found = rank_and_world()[0], []
    for plain in (False, True):
        model = TwoLayers()
        if not plain:
            unwall.shard(model, Plan(compute_dtype=torch.float32))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = optimizer if plain else unwall.wrap(optimizer)
        if first is not None and not plain:
            first(model, optimizer)
        for step, use in enumerate(((0, 1), users)):
            if step and between is not None:
                between(list(model.parameters()))
            losses = (model(inputs(step, one).requires_grad_(), use[one]) for one in ((0, 1) if plain else (rank,)))
            (sum(losses) / (2 if plain else 1)).backward()
        optimizer.step()
        with nullcontext() if plain else unwall.full_params(model):
            found.append([param.detach().clone() for param in model.parameters()])
    return all(torch.allclose(one, other, rtol=1e-5, atol=1e-7) for one, other in zip(*found, strict=True))


@pytest.mark.parametrize(
    ("first", "between", "users"),
    [(a_backward_fails, None, (0, 1)), (None, set_to_none, (0, 2)), (None, set_to_ones, (0, 2)), (None, set_to_ones, (0, 1))],
)
def test_what_was_in_grad_before_another_ranks_gradient(ranks, first, between, users):
    assert ranks(2).run(two_backwards, first, between, users) == [True, True]


def test_what_a_hook_has_cleared_in_a_second_backward_does_not_come_back():
    """Autograd adds to the gradient that is shown, and a hook of the user's clears that before it is taken."""

    def trained(start):
        torch.manual_seed(0)
        model, optimizer = start(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2)))

        def backward(number):
            model(torch.linspace(-1, 1, 32).view(4, 8) * number).square().mean().backward()

        def clear(param):
            param.grad = None

        for step in range(1, 4):
            backward(step)
            handle = model[0].weight.register_post_accumulate_grad_hook(clear)
            backward(step + 1)
            handle.remove()
            optimizer.step()
            optimizer.zero_grad()
            for number in (step + 2, step + 3):
                backward(number)
            optimizer.step()
            optimizer.zero_grad()
        return model.state_dict()

    def sharded(model):
        unwall.shard(model, Plan(compute_dtype=torch.float32))
        return model, unwall.AdamW(model.parameters(), lr=1e-2)

    found = trained(sharded)
    for name, value in trained(lambda model: (model, torch.optim.AdamW(model.parameters(), lr=1e-2))).items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6)
