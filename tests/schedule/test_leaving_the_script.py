"""Ranks that leave what was predicted, in some passes only: the values are those of plain PyTorch, and nothing hangs."""

import functools

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from offload import HOST
from ranks import rank_and_world
from reference import Case, check_parity, seeded, unwall_adamw, vectors
from torch import nn

import unwall
from unwall.plans import Plan
from unwall.schedule.script import Book

WIDTH = 64
STEPS = 16
ODD = (6, 10, 11, 14)
"""Steps in which something is different; scripts are followed in those before."""


def linear():
    return nn.Linear(WIDTH, WIDTH)


def batch():
    return vectors(rows=4, width=WIDTH)


class ExpertNet(nn.Module):
    """Experts, layers that an early exit skips, and parameters that only some calls use."""

    def __init__(self):
        super().__init__()
        self.entry = linear()
        self.experts = nn.ModuleList(nn.Sequential(linear(), nn.Tanh(), linear()) for _ in range(3))
        self.layers = nn.ModuleList(linear() for _ in range(4))
        self.gains = nn.ParameterList(nn.Parameter(torch.ones(WIDTH)) for _ in range(2))
        self.exit = linear()

    def forward(self, x, expert=0, depth=4, gains=(0,), backwards=False):
        parts = [self.entry, self.experts[expert], *self.layers[:depth]]
        for part in reversed(parts) if backwards else parts:
            x = x + torch.tanh(part(x))
        for gain in gains:
            x = x * self.gains[gain]
        return self.exit(x)


def other_expert(step, rank):
    """One rank, or all of them, at an expert that was not used before."""
    return {"expert": (1 + step % 2) if step in ODD and (rank == 0 or step == ODD[-1]) else 0}


def expert_of_the_rank(step, rank):
    """Each rank at its own expert; the ranks change places now and then."""
    return {"expert": (rank + (step in ODD)) % 2}


def early_exit(step, rank):
    return {"depth": 1 + rank % 2 if step in ODD else 4}


def late_exit(step, rank):
    """Layers that no pass of the script has used."""
    return {"depth": 4 if step in ODD and rank == 1 else 2}


def fewer_parameters(step, rank):
    """Which parameters of a group have a gradient changes: on one rank, on all, and back."""
    if step not in ODD:
        return {"gains": (0,)}
    return {"gains": [(), (1,), (0, 1), (1,)][(ODD.index(step) + rank) % 4]}


def no_gain_anywhere(step, rank):
    """A gradient that the script expects comes on no rank."""
    return {"gains": () if step in ODD else (0, 1)}


def another_order(step, rank):
    return {"backwards": step in ODD and rank == 0}


def ever_another(step, rank):
    """No pass is like the one before."""
    return {"expert": (step * 7 + rank) % 3, "depth": 1 + (step * 3 + rank) % 4, "backwards": step % 3 == rank % 3}


CHANGES = [
    other_expert,
    expert_of_the_rank,
    early_exit,
    late_exit,
    fewer_parameters,
    no_gain_anywhere,
    another_order,
    ever_another,
]


def backward(model, drawn, **options):
    inputs, target = drawn
    loss = F.mse_loss(model(inputs, **options), target)
    loss.backward()
    return loss.detach()


def iterate(change, case, model, optimizer, drawn, step, rank):
    return backward(model, drawn, **change(step, rank))


def count_failures():
    """How many scripts failed since the last call, in this rank."""
    if not hasattr(Book, "failures"):
        Book.failures, failed = 0, Book.failed

        def counted(book, situation):
            Book.failures += 1
            failed(book, situation)

        Book.failed = counted
    found, Book.failures = Book.failures, 0
    return found


def case_of(change):
    return Case(build=ExpertNet, batch=batch, iterate=functools.partial(iterate, change))


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize(("stage", "tight"), [(3, False), (3, True), (1, False)], ids=["stage 3", "smallest budget", "stage 1"])
def test_values_are_those_of_plain_pytorch(ranks, change, stage, tight):
    ranks(2).run(count_failures)
    plan = Plan(stage=stage, compute_dtype=torch.float32)
    check_parity(ranks(2), case_of(change), plan, steps=STEPS, tight=tight)
    failures = ranks(2).run(count_failures)
    assert failures[0] == failures[1]
    assert failures[0] > 0 or change is ever_another, "no script was left: the test shows nothing"


@pytest.mark.parametrize("change", [other_expert, early_exit, fewer_parameters])
def test_four_ranks(ranks, change):
    ranks(4).run(count_failures)
    check_parity(ranks(4), case_of(change), Plan(compute_dtype=torch.float32), steps=STEPS)


@pytest.mark.parametrize("change", [other_expert, fewer_parameters, no_gain_anywhere])
def test_updates_ahead_of_the_step(ranks, change):
    check_parity(ranks(2), case_of(change), Plan(compute_dtype=torch.float32, **HOST), steps=STEPS)


def add_up(change, case, model, optimizer, drawn, step, rank):
    """Two backwards for a step; the second is the one that differs."""
    return backward(model, drawn) + backward(model, drawn, **change(step, rank))


@pytest.mark.parametrize("change", [other_expert, fewer_parameters, no_gain_anywhere])
def test_in_one_of_several_backwards(ranks, change):
    case = Case(build=ExpertNet, batch=batch, iterate=functools.partial(add_up, change))
    check_parity(ranks(2), case, Plan(stage=2, compute_dtype=torch.float32), steps=STEPS)


def evaluate_too(change, case, model, optimizer, drawn, step, rank):
    """An evaluation of its own way in each step, and the loss averaged over the ranks by the loop itself."""
    with torch.no_grad():
        model(drawn[0], **change(step, rank))
    loss = F.mse_loss(model(drawn[0], **change(step + 1, rank)), drawn[1])
    _meet_elsewhere()
    loss.backward()
    _meet_elsewhere()
    return loss.detach()


def _meet_elsewhere():
    """Something that blocks until every rank is here, as averaging a loss does."""
    if dist.is_initialized():
        dist.all_reduce(torch.ones(()))


@pytest.mark.parametrize("change", [other_expert, late_exit, ever_another])
def test_collectives_of_the_loop_between_forward_and_backward(ranks, change):
    case = Case(build=ExpertNet, batch=batch, iterate=functools.partial(evaluate_too, change))
    check_parity(ranks(2), case, Plan(compute_dtype=torch.float32), steps=STEPS)


def exchanges_when_always_another():
    rank, _ = rank_and_world()
    model = seeded(ExpertNet)
    unwall.shard(model, Plan(compute_dtype=torch.float32))
    optimizer = unwall_adamw(model)
    for step in range(30):
        if step == 20:
            count_failures()
        backward(model, batch(), expert=step % 3, depth=1 + step % 4, backwards=step % 5 == rank)
        optimizer.step()
    return count_failures()


def test_a_loop_that_changes_in_every_pass_negotiates(ranks):
    for failures in ranks(2).run(exchanges_when_always_another):
        assert failures <= 2


def groups():
    model = seeded(ExpertNet)
    unwall.shard(model, Plan(compute_dtype=torch.float32))
    return len(unwall.api.engine(model).groups)


def test_there_is_something_to_disagree_on(ranks):
    """Guards the tests of this file: experts and layers are groups of their own."""
    assert min(ranks(2).run(groups)) >= 8


def train_then_save():
    """Whole tensors between the passes, at any point."""
    model = seeded(ExpertNet)
    unwall.shard(model, Plan(compute_dtype=torch.float32))
    optimizer = unwall_adamw(model)
    for step in range(12):
        torch.manual_seed(step)
        backward(model, batch())
        if step % 3 == 0:
            model.state_dict()
        optimizer.step()
        if step % 4 == 0:
            with unwall.full_params(model):
                pass
    return model.state_dict()


def test_looks_at_the_model_between_the_passes(ranks):
    model = seeded(ExpertNet)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3, weight_decay=0.1)
    for step in range(12):
        torch.manual_seed(step)
        backward(model, batch())
        optimizer.step()
        optimizer.zero_grad()
    for name, value in ranks(2).run(train_then_save)[0].items():
        torch.testing.assert_close(value, model.state_dict()[name], rtol=1e-5, atol=1e-6)
