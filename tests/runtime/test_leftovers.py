"""What optimizers that are gone leave behind is freed by the model it lies in, and by no other."""

import gc
import weakref

import torch
from letting_go import gone
from torch import nn

import unwall
from unwall.plans import Plan


def build():
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))
    unwall.shard(model, Plan(params="host", optimizer="host", compute_dtype=torch.float32))
    run(model)  # gradients have their memory from now on
    return model


def host_bytes(model):
    return unwall.api.engine(model).tiers.host.ledger.live_bytes


def run(model):
    model(torch.ones(2, 64)).sum().backward()
    model.zero_grad()


def test_another_model_leaves_them_alone():
    first, second = build(), build()
    before = host_bytes(first)
    optimizer = unwall.AdamW(first.parameters())
    held = host_bytes(first)
    assert held > before
    del optimizer
    gc.collect()
    run(second)
    kept = unwall.AdamW(second.parameters())
    unwall.stats(second)
    assert host_bytes(first) == held
    run(first)
    assert host_bytes(first) == before
    assert kept.param_groups


def test_each_model_frees_its_own_of_an_optimizer_over_two():
    first, second = build(), build()
    before = host_bytes(first), host_bytes(second)
    optimizer = unwall.AdamW(first.parameters())
    optimizer.add_param_group({"params": list(second.parameters())})
    run_both = (first(torch.ones(2, 64)) + second(torch.ones(2, 64))).sum()
    run_both.backward()
    optimizer.step()
    unwall.stats(first), unwall.stats(second)
    held = host_bytes(first), host_bytes(second)
    assert held[0] > before[0]
    assert held[1] > before[1]
    kept = weakref.ref(optimizer)
    del optimizer
    assert gone(lambda: kept() is None)
    unwall.stats(first)
    assert (host_bytes(first), host_bytes(second)) == (before[0], held[1])
    unwall.stats(second)
    assert host_bytes(second) == before[1]
