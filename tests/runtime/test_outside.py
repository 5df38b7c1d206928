"""Parameters read and written outside every pass, as code around a plain model does: the same values, and no write is lost."""

import tempfile
import warnings

import pytest
import torch
from ranks import rank_and_world
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import unwall
from unwall import DivergedError

WIDTH = 48
TIERS = ("device", "host", "disk")


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(4)])
        self.scale = nn.Parameter(torch.tensor(3.0))

    def forward(self, x):
        return self.body(x) * self.scale

    def head(self, x):
        """No forward of any module runs around this."""
        return nn.functional.linear(self.body(x), self.body[0].weight) * self.scale


def build(given=torch.float32):
    torch.manual_seed(0)
    return Net().to(given)


def sharded(tier, compute=torch.float32, given=torch.float32, stage=3):
    model = build(given)
    tiers = {} if tier == "device" else {"params": tier, "optimizer": tier}
    if tier == "disk":
        tiers["disk"] = tempfile.mkdtemp()
    unwall.shard(model, unwall.Plan(compute_dtype=compute, stage=stage, **tiers))
    return model


def draw(seed=1):
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(seed))


def train(model, optimizer):
    model(draw()).float().square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def write_a_lot(model):
    """What people write around a model. Returns what they read."""
    first, second, third, fourth = model.body
    with torch.no_grad():
        first.weight.mul_(2)
        first.weight.add_(1)
        first.bias += 0.5
        second.weight[3] = 7.0
        torch._foreach_mul_([second.bias, third.bias], 3.0)
    model.scale.data.clamp_(0, 2.5)
    kept = third.weight.data
    kept.view(-1)[:10].zero_()
    second.weight.detach().t().add_(1.0)
    third.weight.data = third.weight.data * 1.5
    first.weight.data += (second.weight @ third.weight) * 0.25  # as an adapter is merged
    nn.init.constant_(fourth.bias, 0.25)
    torch.manual_seed(7)
    nn.init.normal_(fourth.weight)
    vector_to_parameters(parameters_to_vector(model.parameters()) * 1.25, model.parameters())
    return {name: param.detach().clone() for name, param in model.named_parameters()}


def written(tier, compute, stage=3):
    model = sharded(tier, compute, stage=stage)
    model(draw())  # some groups are resident, some are not
    read = write_a_lot(model)
    output = model(draw()).detach().float()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    return read, state, output


@pytest.mark.parametrize("compute", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("world", [1, 2])
def test_writes_reach_the_master_exactly(ranks, world, compute):
    plain = build()
    expected = write_a_lot(plain)
    for tier in TIERS:
        for rank, (read, state, output) in enumerate(ranks(world).run(written, tier, compute)):
            torch.testing.assert_close(read, expected, rtol=0, atol=0)
            if rank == 0:
                torch.testing.assert_close(state, dict(plain.state_dict()), rtol=0, atol=0)
            if compute is torch.float32:
                torch.testing.assert_close(output, plain(draw()).detach(), rtol=1e-5, atol=1e-4)


def test_writes_where_flat_buffers_stay(ranks):
    expected = write_a_lot(build())
    for stage in (0, 2):
        for read, _, _ in ranks(2).run(written, "device", torch.bfloat16, stage):
            torch.testing.assert_close(read, expected, rtol=0, atol=0)


@pytest.mark.parametrize("tier", TIERS)
def test_training_goes_on_from_what_was_written(tier):
    plain, model = build(), sharded(tier)
    pairs = [(plain, torch.optim.AdamW(plain.parameters(), lr=1e-2)), (model, unwall.AdamW(model.parameters(), lr=1e-2))]
    for net, optimizer in pairs:
        for _ in range(3):
            train(net, optimizer)
            net.scale.data.clamp_(0, 2.9)
            with torch.no_grad():
                net.body[1].weight.clamp_(-0.1, 0.1)
    torch.testing.assert_close(dict(model.state_dict()), dict(plain.state_dict()), rtol=1e-5, atol=1e-6)


def test_metadata_brings_nothing_in():
    model = sharded("host", torch.bfloat16)
    weight, engine = model.body[0].weight, unwall.api.engine(model)
    engine.executor.groups[0].pending.settle()
    moved = unwall.stats(model)
    assert (weight.shape, weight.dtype, weight.numel(), weight.stride()) == (
        (WIDTH, WIDTH),
        torch.float32,
        WIDTH**2,
        (WIDTH, 1),
    )
    assert weight.is_contiguous()
    assert weight.requires_grad
    assert weight.is_leaf
    assert weight.grad is None
    assert torch.zeros_like(weight).dtype is torch.float32
    assert weight.new_ones(3).tolist() == [1, 1, 1]
    assert draw().to(weight).dtype is torch.float32
    assert isinstance(weight, nn.Parameter)
    assert type(type(weight)(torch.ones(2))) is nn.Parameter
    assert not engine.outside._lent
    assert str(unwall.stats(model)) == str(moved)


@pytest.mark.parametrize("tier", ["device", "host"])
def test_one_value_at_a_time_is_held(tier):
    """A loop over the parameters does not bring the model in for good."""
    model = sharded(tier)
    average = [torch.zeros_like(param) for param in model.parameters()]
    for mean, param in zip(average, model.parameters(), strict=True):
        mean.lerp_(param.detach(), 0.5)
        assert len(unwall.api.engine(model).outside._lent) <= 1
    model(draw())
    assert not unwall.api.engine(model).outside._lent


def averaged(tier, compute):
    plain_average = AveragedModel(build(), multi_avg_fn=get_ema_multi_avg_fn(0.9))
    swa = AveragedModel(build())
    model = sharded(tier, compute)
    optimizer = unwall.AdamW(model.parameters(), lr=1e-2)
    own, by_hand = unwall.ema(model, 0.9), [param.detach().clone() for param in model.parameters()]
    for _ in range(3):
        train(model, optimizer)
        plain_average.update_parameters(model)
        swa.update_parameters(model)
        own.update()
        with torch.no_grad():
            for mean, param in zip(by_hand, model.parameters(), strict=True):
                mean.mul_(0.9).add_(param.data, alpha=0.1)
    with torch.no_grad():  # and back into the model
        for mean, param in zip(by_hand, model.parameters(), strict=True):
            param.copy_(mean)
    back = [param.detach().clone() for param in model.parameters()]
    sums = [p.detach().clone() for p in swa.module.parameters()]
    return back, by_hand, own.state_dict()["params"], sums


@pytest.mark.parametrize("world", [1, 2])
def test_averages(ranks, world):
    """AveragedModel (built before shard), an average by hand over ``parameters()``, and unwall.ema."""
    found = [ranks(world).run(averaged, tier, torch.bfloat16)[0] for tier in TIERS]
    for back, by_hand, own, sums in found:
        assert all(torch.equal(a, b) for a, b in zip(back, by_hand, strict=True))
        names = [name for name, _ in build().named_parameters()]
        torch.testing.assert_close(dict(zip(names, by_hand, strict=True)), {name: own[name] for name in names})
        torch.testing.assert_close(sums, found[0][3], rtol=0, atol=0)


@pytest.mark.parametrize("tier", ["device", "host"])
def test_a_penalty_outside_the_forward_reaches_the_gradient(tier):
    plain, model = build(), sharded(tier)
    optimizers = torch.optim.SGD(plain.parameters(), lr=0.1), unwall.wrap(torch.optim.SGD(model.parameters(), lr=0.1))
    for net, optimizer in zip((plain, model), optimizers, strict=True):
        loss = net(draw()).square().mean() + sum(param.square().sum() for param in net.parameters())
        loss.backward()
        optimizer.step()
    torch.testing.assert_close(dict(model.state_dict()), dict(plain.state_dict()), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("compute", [torch.float32, torch.bfloat16])
def test_a_method_outside_every_forward(compute):
    plain, model = build(), sharded("host", compute)
    torch.testing.assert_close(model.head(draw()).float(), plain.head(draw()), rtol=0.05, atol=0.3)
    model.head(draw()).float().sum().backward()
    unwall.AdamW(model.parameters()).step()


class Summed(Net):
    def forward(self, x):
        return super().forward(x) + sum(param.sum() for param in self.parameters())


@pytest.mark.parametrize("tier", ["device", "host"])
def test_parameters_read_in_a_forward_by_iteration(tier):
    torch.manual_seed(0)
    plain = Summed()
    torch.manual_seed(0)
    model = Summed()
    plan = unwall.Plan(
        compute_dtype=torch.float32, params=tier, optimizer=tier, device_bytes=None if tier == "device" else 100_000
    )
    unwall.shard(model, plan)
    torch.testing.assert_close(model(draw()), plain(draw()))


class Clipping(Net):
    """Writes to its parameters in its forward."""

    def forward(self, x):
        with torch.no_grad():
            self.scale.clamp_(max=2.0)
            self.body[1].weight.clamp_(-0.05, 0.05)
        self.body[2].weight.data.clamp_(-0.05, 0.05)
        self.body[2].bias.data = self.body[2].bias.data.clamp(min=0)
        return super().forward(x)


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("compute", [torch.float32, torch.bfloat16])
def test_writes_in_a_forward_are_taken(tier, compute):
    torch.manual_seed(0)
    model = Clipping()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    tiers = {} if tier == "device" else {"params": tier, "optimizer": tier}
    if tier == "disk":
        tiers["disk"] = tempfile.mkdtemp()
    unwall.shard(model, unwall.Plan(compute_dtype=compute, **tiers))
    model(draw())
    state = model.state_dict()
    assert state["scale"].item() == 2.0
    bound = 0.0 if compute is torch.float32 else 2**-8
    for name in ("body.1.weight", "body.2.weight"):
        torch.testing.assert_close(state[name], before[name].clamp(-0.05, 0.05), rtol=bound, atol=0)
        inside = before[name].abs() < 0.049  # only what was clamped is rounded
        assert torch.equal(state[name][inside], before[name][inside])
    torch.testing.assert_close(state["body.2.bias"], before["body.2.bias"].clamp(min=0), rtol=bound, atol=0)
    assert torch.equal(state["body.0.weight"], before["body.0.weight"])


def test_numpy_reads_and_writes():
    model = sharded("host")
    loss = model(draw()).square().mean()
    mean = model.body[0].weight.detach().numpy().mean()
    assert mean == pytest.approx(build().body[0].weight.mean().item(), abs=1e-7)
    loss.backward()  # reading is no change
    model.body[0].weight.detach().numpy()[:] = 2.0
    assert (model.state_dict()["body.0.weight"] == 2.0).all()


def test_a_write_to_an_old_tensor_raises():
    model = sharded("host")
    optimizer = unwall.AdamW(model.parameters(), lr=1e-2)
    kept = model.body[0].weight.data
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        train(model, optimizer)
        model(draw())
    assert any("body.0.weight" in str(one.message) for one in said)
    kept.zero_()
    with pytest.raises(RuntimeError, match=r"body\.0\.weight was written .*full_params\(model, write=True\)"):
        model(draw())
    assert not (model.state_dict()["body.0.weight"] == 0).any()


def test_saving_reads_each_value_once():
    model = sharded("host")
    outside, read = unwall.api.engine(model).outside, []
    outside.lend = lambda param: read.append(param)
    model.state_dict()
    assert not read


def test_functional_calls_leave_the_model_alone():
    model, plain = sharded("host"), build()
    other = {name: nn.Parameter(torch.ones_like(param)) for name, param in model.named_parameters()}
    found = torch.func.functional_call(model, other, draw())
    torch.testing.assert_close(found, torch.func.functional_call(plain, other, draw()))
    torch.testing.assert_close(dict(model.state_dict()), dict(plain.state_dict()), rtol=0, atol=0)
    assert {type(param) for param in other.values()} == {nn.Parameter}  # and the parameters that were lent to it


def test_what_torch_refuses_is_refused():
    model = sharded("host")
    with pytest.raises(RuntimeError, match="leaf Variable that requires grad"):
        model.scale.mul_(2)
    with pytest.raises(RuntimeError, match="keeps its shape"):
        model.scale.data = torch.ones(3)
    assert model.scale.item() == 3.0


def read_on_rank_0():
    model = sharded("host")
    rank, _ = rank_and_world()
    act = model.scale.item if rank == 0 else lambda: model(draw())
    with pytest.raises(DivergedError):
        act()
    return True


def test_a_read_of_one_rank_alone_is_told(ranks):
    assert all(ranks(2).run(read_on_rank_0))
