"""Any model trains as with plain PyTorch: what it is made of, how its parameters are used, what its modules give."""

import pytest
import torch
from models import CASES, EncoderNet, NestedNet, NormNet, RepeatNet, TiedNet, linear
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
    train_plain,
    unwall_adamw,
    vectors,
    whole_state,
)
from torch import nn

import unwall
from unwall.plan import Plan

# With one rank a shard is the whole and nothing streams. With two, the smallest budget makes groups come and go.
WORLDS = pytest.mark.parametrize(("world", "tight"), [(1, False), (2, True)], ids=["one-rank", "two-ranks"])


@WORLDS
@pytest.mark.parametrize("name", CASES)
def test_model(ranks, name, world, tight):
    check_parity(ranks(world), CASES[name], tight=tight)


@pytest.mark.parametrize("name", ["TiedNet", "BorrowingNet", "ScalarNet", "AttentionNet", "ReentrantNet"])
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_model_in_the_other_stages(ranks, name, stage):
    check_parity(ranks(2), CASES[name], Plan(stage=stage, compute_dtype=torch.float32))


def test_tied_weights_stay_one_parameter():
    model = TiedNet()
    unwall.shard(model, FP32)
    assert model.head.weight is model.embed.weight
    assert torch.equal(model.state_dict()["head.weight"], model.state_dict()["embed.weight"])


class BranchNet(nn.Module):
    """Which branch runs is an argument, as in a mixture of experts."""

    def __init__(self):
        super().__init__()
        self.entry = linear()
        self.branches = nn.ModuleList(nn.Sequential(linear(), nn.Tanh(), linear()) for _ in range(3))
        self.exit = linear()
        self.unused = linear()

    def forward(self, x, branch):
        return self.exit(self.branches[branch](torch.tanh(self.entry(x))))


def branch_of_the_step(case, model, optimizer, batch, step, rank):
    """Another branch each step: what one step does not use is not updated in it."""
    return backward_through(model, batch, step % 3)


def branch_of_the_rank(case, model, optimizer, batch, step, rank):
    """Another branch on each rank: a rank without a gradient counts as zero. Branch 2 is used by no rank in even steps."""
    return backward_through(model, batch, rank if step % 2 == 0 else 2 - rank)


def backward_through(model, batch, branch):
    inputs, target = batch
    loss = nn.functional.mse_loss(model(inputs, branch), target)
    loss.backward()
    return loss.detach()


@WORLDS
@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("iterate", [branch_of_the_step, branch_of_the_rank])
def test_control_flow_that_changes(ranks, iterate, stage, world, tight):
    case = Case(build=BranchNet, iterate=iterate)
    plan = Plan(stage=stage, compute_dtype=torch.float32)
    got = check_parity(ranks(world), case, plan, steps=7, tight=tight)
    start = seeded(BranchNet).state_dict()
    assert torch.equal(got[0].state["unused.weight"], start["unused.weight"])  # not even decayed


def freeze(case, model, optimizer, batch, step, rank):
    """A different part is trained from step to step; the first layer never is."""
    model.stages[0].requires_grad_(False)
    model.stages[1].requires_grad_(step % 2 == 0)
    model.tail.requires_grad_(step % 3 != 0)
    loss = case.loss(model, batch)
    loss.backward()
    return loss.detach()


@WORLDS
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_requires_grad_switched_between_iterations(ranks, stage, world, tight):
    plan = Plan(stage=stage, compute_dtype=torch.float32)
    got = check_parity(ranks(world), Case(build=NestedNet, iterate=freeze), plan, steps=7, tight=tight)
    start = seeded(NestedNet).state_dict()
    for name in start:
        assert torch.equal(got[0].state[name], start[name]) == name.startswith("stages.0"), name


class HalfFrozenNet(NestedNet):
    """Frozen from the start, within one module too."""

    def __init__(self):
        super().__init__()
        self.stages[0].requires_grad_(False)
        self.tail[0].bias.requires_grad_(False)


@WORLDS
def test_frozen_parameters(ranks, world, tight):
    got = check_parity(ranks(world), Case(build=HalfFrozenNet), tight=tight)
    start = seeded(HalfFrozenNet).state_dict()
    assert torch.equal(got[0].state["tail.0.bias"], start["tail.0.bias"])


def twice_backward(case, model, optimizer, batch, step, rank):
    """Two losses of one forward, and one of them twice."""
    inputs, target = batch
    out = model(inputs)
    first, second = out.square().mean(), nn.functional.mse_loss(out, target)
    first.backward(retain_graph=True)
    second.backward(retain_graph=True)
    second.backward()
    return (first + second).detach()


@WORLDS
@pytest.mark.parametrize("build", [RepeatNet, NestedNet])
def test_several_backward_calls_on_one_forward(ranks, build, world, tight):
    check_parity(ranks(world), Case(build=build, iterate=twice_backward), tight=tight)


def two_forwards(case, model, optimizer, batch, step, rank):
    """Two forwards before either backward, which run in the order of the forwards."""
    inputs, target = batch
    losses = [case.loss(model, (inputs[half], target[half])) for half in (slice(0, 4), slice(4, 8))]
    for loss in losses:
        loss.backward()
    return (losses[0] + losses[1]).detach()


@WORLDS
def test_two_forwards_before_their_backwards(ranks, world, tight):
    check_parity(ranks(world), Case(build=NestedNet, iterate=two_forwards), tight=tight)


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


class CompiledNet(nn.Module):
    """Blocks compiled by the user before sharding."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(linear(), nn.GELU(), linear()) for _ in range(3))
        for block in self.blocks:
            block.compile(backend="aot_eager")

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return x


@WORLDS
def test_compiled_blocks(ranks, world, tight):
    check_parity(ranks(world), Case(build=CompiledNet), tight=tight, steps=4)


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


def test_buffers_are_those_of_plain_pytorch(ranks):
    """Each rank keeps its own running statistics, as DistributedDataParallel without broadcast does; rank 0's are shown."""
    got = check_parity(ranks(2), Case(build=NormNet))
    assert int(got[0].state["body.1.num_batches_tracked"]) == 5
    assert train_plain(Case(build=NormNet), world=2).state["body.1.running_mean"].abs().sum() > 0
