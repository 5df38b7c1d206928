"""What the tests of updates ahead of ``step`` share: a small model, its loop, and a comparison with everything on the device."""

import time

import torch
from torch import nn

import unwall
from unwall.optim.updates import drain
from unwall.plans import Plan

DEVICE = {"params": "device", "optimizer": "device"}
HOST = {"params": "host", "optimizer": "host"}


def on_disk(folder):
    """Parameters, gradients and states, all of them on disk."""
    return {"params": "disk", "optimizer": "disk", "disk": folder}


def build():
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64)) for _ in range(6)]
    return nn.Sequential(*blocks, nn.Linear(64, 8))


def start(plan, dtype=torch.bfloat16, **options):
    model = build()
    unwall.shard(model, Plan(compute_dtype=dtype, **plan))
    return model, unwall.AdamW(model.parameters(), lr=1e-2, **options)


def backward(model, seed, scale=1.0):
    torch.manual_seed(seed)
    inputs, target = torch.randn(16, 64), torch.randn(16, 8)
    ((model(inputs).float() - target).square().mean() * scale).backward()


def wait_until(happened):
    end = time.monotonic() + 200
    while not happened():
        assert time.monotonic() < end
        time.sleep(0.001)


def outcome(model, optimizer):
    states = optimizer.state_dict()["state"]
    moments = {f"{number}.{name}": value for number, entry in states.items() for name, value in entry.items()}
    return {**model.state_dict(), **moments}


def same(scenario, host_plan=HOST, dtype=torch.bfloat16, **options):
    """Runs a scenario with everything on the device (where nothing runs ahead) and on the host; returns the host's stats."""
    results = []
    for plan in (DEVICE, host_plan):
        model, optimizer = start(plan, dtype, **options)
        scenario(model, optimizer)
        results.append(outcome(model, optimizer))
    expected, got = results
    assert [name for name in expected if not torch.equal(expected[name], got[name])] == []
    return unwall.stats(model)


def steps(model, optimizer, count, first=0, scale=1.0):
    for seed in range(first, first + count):
        backward(model, seed, scale)
        drain()
        optimizer.step()
        optimizer.zero_grad()
