"""Models over some of the ranks beside models over all of them: each has its own agreement, and none disturbs another."""

import pytest
import torch
import torch.distributed as dist
from models import NestedNet
from ranks import rank_and_world
from reference import seeded, vectors
from torch.distributed.device_mesh import DeviceMesh

import unwall
from unwall.plans import Plan

FP32 = Plan(compute_dtype=torch.float32)


class Training:
    """A model of some ranks, or of all. Every rank gives it the same batch, so that one rank alone trains the same model."""

    def __init__(self, members=None, plan=FP32):
        self.here = members is None or rank_and_world()[0] in members
        mesh = None if members is None else DeviceMesh("cpu", list(members))  # all ranks call it
        if self.here:
            self.model = unwall.shard(seeded(NestedNet), plan, mesh)
            self.optimizer = unwall.AdamW(self.model.parameters(), lr=1e-2)

    def iteration(self, number):
        if not self.here:
            return
        torch.manual_seed(number)
        inputs, target = vectors()
        (self.model(inputs) - target).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def whole(self):
        return self.model.state_dict() if self.here else {}


def train_in_turns(groups, steps):
    trainings = [Training(members) for members in groups]
    for number in range(steps):
        for training in trainings:
            training.iteration(number)
    dist.barrier()  # the user's own collectives are undisturbed, too
    return [training.whole() for training in trainings]


def plainly(steps):
    model = seeded(NestedNet)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for number in range(steps):
        torch.manual_seed(number)
        inputs, target = vectors()
        (model(inputs) - target).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


@pytest.mark.parametrize(
    "groups",
    [[(0, 1), None], [None, (1, 2)], [(0, 1), (1, 2), None, (0, 2)], [(2,), None, (0, 1)], [(0, 1), (0, 1)]],
    ids=str,
)
def test_models_over_other_ranks_train_side_by_side(ranks, groups):
    expected, found = plainly(4), ranks(3).run(train_in_turns, groups, 4)
    for at, members in enumerate(groups):
        first = 0 if members is None else members[0]
        torch.testing.assert_close(found[first][at], expected, rtol=1e-4, atol=1e-5)
