"""Any model trains as with plain PyTorch: what it is made of, how its parameters are used, what its modules give."""

from dataclasses import dataclass

import pytest
import torch
from models import CASES, WIDTH, NestedNet, NormNet, TiedNet, linear
from reference import FP32, Case, check_parity, seeded, train_plain
from torch import nn
from transformers.modeling_outputs import BaseModelOutput

import unwall
from unwall.plans import Plan

# With one rank a shard is the whole and nothing streams. With two, the smallest budget makes groups come and go.
WORLDS = pytest.mark.parametrize(("world", "tight"), [(1, False), (2, True)], ids=["one-rank", "two-ranks"])


@dataclass
class Pair:
    left: torch.Tensor
    right: torch.Tensor


class OutputNet(nn.Module):
    """Inner modules that give tuples, dicts, dataclasses, lists inside dicts, and ModelOutput."""

    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleList(Give(kind) for kind in ("tuple", "dict", "dataclass", "nested", "output"))

    def forward(self, x):
        total = x
        for part in self.parts:
            out = part(torch.tanh(total))
            if part.kind == "tuple":
                total = out[0] + out[1]
            elif part.kind == "dict":
                total = out["left"] + out["right"]
            elif part.kind == "dataclass":
                total = out.left + out.right
            elif part.kind == "nested":
                total = out["all"][0]["left"] + out["all"][1][0]
            else:
                total = out.last_hidden_state + out.hidden_states[0]
        return total


class Give(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.left, self.right = (nn.Parameter(torch.randn(WIDTH, WIDTH) / 4) for _ in range(2))

    def forward(self, x):
        left, right = x @ self.left, x @ self.right
        if self.kind == "tuple":
            return left, right, None, 3
        if self.kind == "dict":
            return {"left": left, "right": right}
        if self.kind == "dataclass":
            return Pair(left, right)
        if self.kind == "nested":
            return {"all": [{"left": left}, (right, "text")]}
        return BaseModelOutput(last_hidden_state=left, hidden_states=(right,))


CASES["OutputNet"] = Case(build=OutputNet)


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
    """Another branch in each step: what one step does not use is not updated in it."""
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


def test_buffers_are_those_of_plain_pytorch(ranks):
    """Each rank keeps its own running statistics, as DistributedDataParallel without broadcast does; rank 0's are shown."""
    got = check_parity(ranks(2), Case(build=NormNet))
    assert int(got[0].state["body.1.num_batches_tracked"]) == 5
    assert train_plain(Case(build=NormNet), world=2).state["body.1.running_mean"].abs().sum() > 0
