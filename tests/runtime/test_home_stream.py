"""Whoever comes to the engine from another CUDA stream visits the one that the pass is at home on. Where there is no accelerator
everybody is said to come from elsewhere: each way in has to visit, and nothing else changes."""

from contextlib import contextmanager

import pytest
import torch
from torch import nn

import unwall
from unwall.plans import Plan
from unwall.runtime.home_stream import HomeStream

WIDTH = 64
HOST = {"params": "host", "optimizer": "host", "compute_dtype": torch.float32}
PLANS = {
    "device": Plan(params="device", optimizer="device", compute_dtype=torch.float32),
    "host": Plan(**HOST, device_bytes="96KiB", tiles=1),
    "tiles": Plan(**HOST, tiles=4),
}

VISITS = {"device": (8, 1), "host": (8, 12), "tiles": (4, 49)}
"""In a step. Gradients: those of tiles are written in their place. Others: the end of backward; where groups come and go also the
calls of four layers, their beginning in backward, and what three of them have saved; of 16 tiles two reads and a gradient."""


def trained(plan):
    torch.manual_seed(0)
    model = unwall.shard(nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4))), plan)
    optimizer = unwall.AdamW(model.parameters(), lr=1e-2)
    for step in range(3):
        model(torch.linspace(-1, 1, 4 * WIDTH).view(4, WIDTH) * (step + 1)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


@pytest.mark.parametrize("name", PLANS)
def test_whoever_comes_from_elsewhere_visits(name, monkeypatch):
    expected = trained(PLANS[name])
    visits = []

    @contextmanager
    def visited(self, *brought):
        visits.append(len(brought))
        yield

    monkeypatch.setattr(HomeStream, "elsewhere", property(lambda _: True))
    monkeypatch.setattr(HomeStream, "visited", visited)
    found = trained(PLANS[name])
    gradients, others = VISITS[name]
    assert visits.count(1) == 3 * gradients
    assert visits.count(0) >= 3 * others
    assert all(torch.equal(value, found[key]) for key, value in expected.items())
