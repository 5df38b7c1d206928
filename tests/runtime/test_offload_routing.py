"""Experts chosen at random in each iteration: no pass predicts the next one, and the bits and the speed do not suffer."""

import random
import statistics
import time

import pytest
import torch
from offload import DEVICE, DISK, HOST, differing, outcome, over_budget, smallest
from torch import nn

import unwall
from unwall.plans import Plan
from unwall.schedule import executor

WIDTH, EXPERTS = 64, 12


class Routed(nn.Module):
    """Three layers of experts; each call uses two experts per layer, as a seeded generator says."""

    def __init__(self, width=WIDTH):
        super().__init__()
        self.layers = nn.ModuleList(nn.ModuleList(nn.Linear(width, width) for _ in range(EXPERTS)) for _ in range(3))

    def forward(self, x, chooser):
        for experts in self.layers:
            for number in chooser.sample(range(EXPERTS), 2):
                x = x + torch.tanh(experts[number](x))
        return x


def start(fields, width=WIDTH):
    torch.manual_seed(0)
    model = Routed(width)
    unwall.shard(model, Plan(**fields))
    return model, unwall.AdamW(model.parameters(), lr=1e-2)


def train(model, optimizer, steps, first=0, width=WIDTH):
    for number in range(first, first + steps):
        torch.manual_seed(number)
        model(torch.randn(8, width), random.Random(number)).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    unwall.stats(model)


def tight(fields):
    """The same plan with the smallest device budget: groups must come and go."""
    return {**fields, "device_bytes": smallest(Routed(), "device_bytes", **fields)}


@pytest.mark.parametrize("small_device", [False, True], ids=["roomy", "tight"])
@pytest.mark.parametrize("placement", [HOST, DISK, {"params": "host", "optimizer": "disk"}], ids=["host", "disk", "host-disk"])
def test_random_routing_gives_the_same_bits(placement, small_device, tmp_path):
    model, optimizer = start(DEVICE)
    train(model, optimizer, steps=8)
    expected = outcome(model, optimizer)
    fields = {**placement, "disk": str(tmp_path)}
    model, optimizer = start(tight(fields) if small_device else fields)
    train(model, optimizer, steps=8)
    assert differing(expected, outcome(model, optimizer)) == []
    assert over_budget(model) == []
    assert unwall.stats(model).trace_mismatches > 4  # the order did change


@pytest.mark.clock
@pytest.mark.parametrize("placement", [HOST, DISK], ids=["host", "disk"])
def test_random_routing_is_not_slower_than_fetching_on_demand(placement, tmp_path, monkeypatch):
    """Interleaved rounds of one model, with and without fetching ahead, on a slow link: the medians are compared."""
    width = 128
    fields = {**placement, "disk": str(tmp_path)}
    model, optimizer = start(fields, width)
    train(model, optimizer, steps=3, width=width)
    tiers = unwall.api.engine(model).tiers
    group_bytes = 2 * width * width
    if placement is HOST:
        tiers.links.pool("host", "device").throttle(2 * group_bytes / 0.01)  # 10 ms per group
    else:
        tiers.disk.engine.throttle("read", 7 * group_bytes / 0.01)  # the update's reads as well
    ahead = executor.LOOK_AHEAD
    rounds = {ahead: [], 0: []}
    for number in range(14):
        depth = ahead if number % 2 else 0
        monkeypatch.setattr(executor, "LOOK_AHEAD", depth)
        began = time.perf_counter()
        train(model, optimizer, steps=1, first=100 + number, width=width)
        rounds[depth].append(time.perf_counter() - began)
    with_it, without = statistics.median(rounds[ahead]), statistics.median(rounds[0])
    assert with_it <= 1.25 * without, f"{with_it:.3f} s with fetching ahead, {without:.3f} s on demand"
