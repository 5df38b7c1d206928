"""Any training loop: what runs between forward and step, how often, in which order, and what goes wrong in between."""

import pytest
import torch
import torch.nn.functional as F
from models import EncoderNet, NestedNet, RepeatNet, linear
from ranks import rank_and_world
from reference import (
    FP32,
    Case,
    adamw,
    assert_close,
    average_gradients,
    check_parity,
    mse,
    seeded,
    shard_tight,
    unwall_adamw,
    vectors,
    whole_state,
)
from torch import nn

import unwall
from unwall.plans import Plan

# With one rank a shard is the whole and nothing streams. With two, the smallest budget makes groups come and go.
WORLDS = pytest.mark.parametrize(("world", "tight"), [(1, False), (2, True)], ids=["one-rank", "two-ranks"])


class ChainNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.third = linear(), linear(), linear()

    def forward(self, x):
        return self.third(torch.tanh(self.second(torch.tanh(self.first(x)))))


def twice_backward(case, model, optimizer, batch, step, rank):
    """Two losses of one forward, and one of them twice."""
    inputs, target = batch
    out = model(inputs)
    first, second = out.square().mean(), F.mse_loss(out, target)
    first.backward(retain_graph=True)
    second.backward(retain_graph=True)
    second.backward()
    return (first + second).detach()


@WORLDS
@pytest.mark.parametrize("build", [RepeatNet, NestedNet])
def test_several_backward_calls_on_one_forward(ranks, build, world, tight):
    check_parity(ranks(world), Case(build=build, iterate=twice_backward), tight=tight)


def two_forwards(case, model, optimizer, batch, step, rank):
    """Two forwards before either backward, which run in the order of the forwards or against it."""
    inputs, target = batch
    losses = [case.loss(model, (inputs[half], target[half])) for half in (slice(0, 4), slice(4, 8))]
    for loss in losses if step % 2 == 0 else reversed(losses):
        loss.backward()
    return (losses[0] + losses[1]).detach()


@WORLDS
@pytest.mark.parametrize("build", [NestedNet, ChainNet])
def test_two_forwards_before_their_backwards(ranks, build, world, tight):
    check_parity(ranks(world), Case(build=build, iterate=two_forwards), tight=tight)


def some_inputs(case, model, optimizer, batch, step, rank):
    """A backward for two of the parameters only."""
    loss = case.loss(model, batch)
    loss.backward(inputs=[model.first.weight, model.third.weight])
    return loss.detach()


@WORLDS
def test_backward_for_some_parameters(ranks, world, tight):
    check_parity(ranks(world), Case(build=ChainNet, iterate=some_inputs), tight=tight)


def gradient_penalty(case, model, optimizer, batch, step, rank):
    """The gradient of a gradient: backward runs through the layers twice."""
    inputs, target = batch
    out = model(inputs.requires_grad_())
    (slope,) = torch.autograd.grad(out.square().sum(), inputs, create_graph=True)
    loss = F.mse_loss(out, target) + 0.1 * slope.square().mean()
    loss.backward()
    return loss.detach()


@WORLDS
def test_gradient_penalty(ranks, world, tight):
    check_parity(ranks(world), Case(build=ChainNet, iterate=gradient_penalty), tight=tight)


def regularised(model, batch):
    """Parameters read in the training loop, after forward has let them go."""
    return mse(model, batch) + 0.1 * model.first.weight.square().sum() + model.second.bias.norm()


@WORLDS
def test_parameters_read_in_the_training_loop(ranks, world, tight):
    check_parity(ranks(world), Case(build=ChainNet, loss=regularised), tight=tight)


class HookedNet(ChainNet):
    """A user's own hooks on modules and parameters."""

    def __init__(self):
        super().__init__()
        self.first.register_forward_hook(shift)
        self.second.register_full_backward_hook(double)
        self.third.weight.register_hook(halve)


def shift(module, args, output):
    return output + 1


def double(module, grad_input, grad_output):
    return (grad_input[0] * 2,)


def halve(grad):
    return grad / 2


@WORLDS
def test_hooks_of_the_user(ranks, world, tight):
    check_parity(ranks(world), Case(build=HookedNet), tight=tight)


def input_gradient(case, model, optimizer, batch, step, rank):
    """The gradient of the input is part of the result, as with adversarial training."""
    inputs, target = batch
    inputs.requires_grad_()
    loss = mse(model, (inputs, target))
    loss.backward()
    return loss.detach() + inputs.grad.norm()


@WORLDS
def test_gradient_of_the_input(ranks, world, tight):
    check_parity(ranks(world), Case(build=NestedNet, iterate=input_gradient), tight=tight)


def evaluate_between(case, model, optimizer, batch, step, rank):
    model.eval()
    with torch.no_grad():
        before = case.loss(model, batch)
    model.train()
    loss = case.loss(model, batch)
    with torch.inference_mode():
        case.loss(model, batch)  # between forward and backward
    loss.backward()
    return before + loss.detach()


@WORLDS
@pytest.mark.parametrize("build", [NestedNet, EncoderNet])
def test_evaluation_between_training_steps(ranks, build, world, tight):
    check_parity(ranks(world), Case(build=build, iterate=evaluate_between), tight=tight)


class FailingBackward(torch.autograd.Function):
    @staticmethod
    def forward(_, x):
        return x.clone()

    @staticmethod
    def backward(*_):
        raise torch.OutOfMemoryError("no memory in backward")


class FragileNet(NestedNet):
    """Fails where it is told to."""

    fail = None

    def forward(self, x):
        for index, (stage, gain) in enumerate(zip(self.stages, self.gains, strict=True)):
            x = x + gain * stage["norm"](stage["mix"](x))
            if index == 0 and self.fail == "forward":
                raise torch.OutOfMemoryError("no memory in forward")
            if index == 0 and self.fail == "backward":
                x = FailingBackward.apply(x)
        return self.tail(x) + self.extra["bias"]


def fail_then_train(case, model, optimizer, batch, step, rank):
    """Every step fails in forward and in backward first; the attempt's gradients are dropped."""
    for where in ("forward", "backward"):
        model.fail = where
        with pytest.raises(torch.OutOfMemoryError, match=f"no memory in {where}"):
            case.loss(model, batch).backward()
        optimizer.zero_grad()
    model.fail = None
    loss = case.loss(model, batch)
    loss.backward()
    return loss.detach()


@WORLDS
@pytest.mark.parametrize("stage", [1, 3])
def test_training_goes_on_after_an_exception(ranks, stage, world, tight):
    plan = Plan(stage=stage, compute_dtype=torch.float32)
    check_parity(ranks(world), Case(build=FragileNet, iterate=fail_then_train), plan, tight=tight)


def play(generator, critic, optimizers, noise, real):
    """One step of each of two models: the critic's gradient flows into the generator."""
    made, judge = optimizers
    score = critic(generator(noise).detach()).square().mean() + (critic(real) - 1).square().mean()
    score.backward()
    yield judge
    fooled = (critic(generator(noise)) - 1).square().mean()
    fooled.backward()
    judge.zero_grad()
    yield made


def train_two():
    rank, world = rank_and_world()
    generator, critic = seeded(NestedNet, 0), seeded(RepeatNet, 1)
    for model in (generator, critic):
        shard_tight(model) if world > 1 else unwall.shard(model, FP32)
    optimizers = unwall_adamw(generator), unwall_adamw(critic)
    for step in range(4):
        torch.manual_seed(1000 + step * world + rank)
        for optimizer in play(generator, critic, optimizers, *vectors()):
            optimizer.step()
            optimizer.zero_grad()
    return whole_state(generator), whole_state(critic)


def train_two_plain(world):
    models = [(seeded(NestedNet, 0), seeded(RepeatNet, 1)) for _ in range(world)]
    optimizers = [tuple(adamw(model) for model in pair) for pair in models]
    for step in range(4):
        games = []
        for rank in range(world):
            torch.manual_seed(1000 + step * world + rank)
            games.append(play(*models[rank], optimizers[rank], *vectors()))
        for which in (1, 0):
            stepped = [next(game) for game in games]
            average_gradients([pair[which] for pair in models])
            for optimizer in stepped:
                optimizer.step()
                optimizer.zero_grad()
    return tuple(model.state_dict() for model in models[0])


@pytest.mark.parametrize("world", [1, 2])
def test_two_models_train_together(ranks, world):
    for plain, got in zip(train_two_plain(world), ranks(world).run(train_two)[0], strict=True):
        assert_close(plain, got)


PLACES = pytest.mark.parametrize(
    "plan",
    [
        {"params": "device", "optimizer": "device"},
        {"params": "host", "optimizer": "host"},
        {"params": "disk", "optimizer": "disk"},
    ],
    ids=["device", "host", "disk"],
)


@PLACES
def test_backward_through_a_graph_from_before_the_step_is_refused_as_in_pytorch(plan, tmp_path):
    model = seeded(ChainNet)
    unwall.shard(model, Plan(compute_dtype=torch.float32, disk=tmp_path, **plan))
    optimizer = unwall_adamw(model)
    inputs, target = vectors()
    earlier, later = mse(model, (inputs, target)), mse(model, (inputs, target))
    later.backward()
    optimizer.step()
    optimizer.zero_grad()
    with pytest.raises(RuntimeError, match=r"modified .*by an inplace operation"):
        earlier.backward()
    optimizer.zero_grad()
    before = model.state_dict()
    mse(model, (inputs, target)).backward()  # and training goes on
    optimizer.step()
    assert not torch.equal(before["first.weight"], model.state_dict()["first.weight"])


@PLACES
def test_a_saved_activation_that_was_changed_is_refused_as_in_pytorch(plan, tmp_path):
    class Changes(ChainNet):
        def forward(self, x):
            hidden = torch.tanh(self.first(x))
            out = self.second(hidden)
            hidden.add_(1)  # the second layer's backward needs it as it was
            return out

    model = seeded(Changes)
    unwall.shard(model, Plan(compute_dtype=torch.float32, disk=tmp_path, **plan))
    inputs, target = vectors()
    with pytest.raises(RuntimeError, match=r"modified .*by an inplace operation"):
        mse(model, (inputs, target)).backward()
