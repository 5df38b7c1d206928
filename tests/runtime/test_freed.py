"""A model that its user lets go of is gone, with all that unwall has for it, however it was used before."""

import contextlib
import weakref

import pytest
import torch
from letting_go import gone
from offload import HOST
from ranks import rank_and_world
from reference import seeded, unwall_adamw, vectors
from torch import nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

import unwall
from unwall.plans import Plan

WIDTH = 64
STEPS = 12
PLACEMENTS = {"device": {}, "host": HOST}


class Net(nn.Module):
    """Experts of which a call uses one, checkpointed on request."""

    def __init__(self):
        super().__init__()
        self.entry = nn.Linear(WIDTH, WIDTH)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3))

    def forward(self, x, expert=0, recompute=False):
        x = torch.tanh(self.entry(x))
        chosen = self.experts[expert]
        return x + (checkpoint(chosen, x, use_reentrant=False) if recompute else chosen(x))


def usual(model, step):
    return model(vectors(width=WIDTH)[0])


def other_experts(model, step):
    """Ranks change their expert, each at its own time. What the others need is gathered here, too, and never used."""
    rank, _ = rank_and_world()
    return model(vectors(width=WIDTH)[0], expert=step % 3 if rank == 0 and step % 5 == 4 else 0)


def checkpointed_experts(model, step):
    rank, _ = rank_and_world()
    return model(vectors(width=WIDTH)[0], expert=step % 3 if rank == 0 and step % 5 == 4 else 0, recompute=True)


def abandoned(model, step):
    """Forwards whose backward never comes, before the one whose does, and an evaluation."""
    usual(model, step)
    kept = other_experts(model, step)
    with torch.no_grad():
        usual(model, step)
    return kept if step % 2 else other_experts(model, step)


def hooked(model, step):
    with save_on_cpu():
        return other_experts(model, step)


def hooked_by_the_model(model, step):
    """Hooks that hold the model themselves."""
    with saved_tensors_hooks(lambda tensor, model=model: tensor.detach(), lambda tensor: tensor):
        return other_experts(model, step)


def raised(model, step):
    with contextlib.suppress(RuntimeError):
        model(torch.ones(2, 3))
    return usual(model, step)


WAYS = [usual, other_experts, checkpointed_experts, abandoned, hooked, hooked_by_the_model, raised]


def train_and_let_go(run, placement):
    """What is left of the model once it is out of sight, as a weak reference to its engine says."""

    def train():
        model = seeded(Net)
        unwall.shard(model, Plan(compute_dtype=torch.float32, **PLACEMENTS[placement]))
        optimizer = unwall_adamw(model)
        for step in range(STEPS):
            run(model, step).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        if run is abandoned:
            run(model, STEPS)
        return weakref.ref(unwall.api.engine(model))

    engine = train()
    return gone(lambda: engine() is None, limit_s=60)


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("run", WAYS)
@pytest.mark.parametrize("world", [1, 2])
def test_a_model_is_freed(ranks, world, run, placement):
    assert all(ranks(world).run(train_and_let_go, run, placement))
