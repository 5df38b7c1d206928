"""A forward that calls collectives of its own, over the group that the model is sharded over or another one: ranks whose updates
take differently long fetch the same groups ahead of it, so nobody waits for a rank that waits for it."""

import pytest
import torch
import torch.distributed as dist
from ranks import rank_and_world
from torch import nn

import unwall
from unwall.plans import Plan
from unwall.shards.store import Pending

WIDTH, LAYERS, STEPS = 32, 6, 5


class Averaging(nn.Module):
    """Its activations' mean over the ranks goes into the next layer."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
        self.group = None

    def forward(self, x):
        for layer in self.layers:
            x = layer(x).tanh()
            if dist.is_initialized():
                mean = x.detach().mean(0)
                dist.all_reduce(mean, group=self.group)
                x = x + 0.1 * mean
        return x


def slow_updates(patch):
    """As if no update were ever done before someone waits for it."""
    patch.setattr(Pending, "updating", property(lambda self: self.ahead is not None or self.update is not None))


def train(second_group, uneven):
    torch.manual_seed(0)
    model, rank = Averaging(), rank_and_world()[0]
    unwall.shard(model, Plan(params="host", optimizer="host", compute_dtype=torch.float32, device_bytes="96KiB"))
    optimizer = unwall.AdamW(model.parameters(), lr=1e-2, speculate=False)
    model.group = dist.new_group() if second_group else None
    with pytest.MonkeyPatch.context() as patch:
        if uneven and rank:
            slow_updates(patch)
        for number in range(STEPS):
            torch.manual_seed(2 * number + rank)
            model(torch.randn(4, WIDTH)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if uneven and not rank:
                for group in unwall.api.engine(model).groups:
                    group.pending.update.wait()
    return model.state_dict(), unwall.stats(model).trace_mismatches


@pytest.mark.parametrize("second_group", [False, True])
def test_ranks_whose_updates_take_differently_long(ranks, second_group):
    expected, _ = ranks(2).run(train, second_group, uneven=False)[0]
    got, mismatches = ranks(2).run(train, second_group, uneven=True)[0]
    assert expected.keys() == got.keys()
    assert all(torch.equal(value, got[name]) for name, value in expected.items())
    assert mismatches == 0
