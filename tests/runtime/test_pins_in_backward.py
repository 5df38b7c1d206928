"""Frozen layers in backward: no gradient tells when they are done with, and they do not stay until its end."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import unwall

WIDTH, LAYERS = 32, 12
HOST = unwall.Plan(compute_dtype=torch.float32, params="host", optimizer="host", device_bytes="48KiB")


class Chain(nn.Module):
    """Frozen layers, each the input of the next one."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH).requires_grad_(False) for _ in range(LAYERS))

    def one(self, layer, x, _memory):
        return layer(x).tanh()

    def forward(self, x, seen=lambda: None):
        memory = x = self.first(x)
        for layer in self.layers:
            x = self.one(layer, x, memory)
            x.register_hook(lambda _: seen())
        return x


class Shared(Chain):
    """Each of them reads what the first layer made, whose gradient is complete only when all of them have run backward."""

    def one(self, layer, x, memory):
        return x + layer(memory).tanh()


class Reentrant(Chain):
    def one(self, layer, x, _memory):
        return checkpoint(lambda y: layer(y).tanh(), x, use_reentrant=True)


@pytest.mark.parametrize("kind", [Chain, Shared, Reentrant])
def test_frozen_layers_are_let_go_when_backward_has_passed_them(kind):
    torch.manual_seed(0)
    model = kind()
    unwall.shard(model, HOST)
    optimizer = unwall.AdamW(model.first.parameters())
    executor = unwall.api.engine(model).executor
    assert len(executor.groups) > LAYERS
    counts = []
    for _ in range(4):
        counts.clear()
        loss = model(torch.ones(2, WIDTH), lambda: counts.append(len(executor.pins.soft))).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert len(counts) == LAYERS
    assert max(counts) <= 2, counts


@pytest.mark.parametrize("kind", [Chain, Shared])
def test_a_further_backward_through_the_same_graph_lets_them_go_too(kind):
    torch.manual_seed(0)
    model = kind()
    unwall.shard(model, HOST)
    pins, counts = unwall.api.engine(model).executor.pins, []
    output = model(torch.ones(2, WIDTH), lambda: counts.append(len(pins.soft)))
    for again in (True, True, False):
        output.square().mean().backward(retain_graph=again)
    assert len(counts) == 3 * LAYERS
    assert max(counts) <= 2, counts


def test_a_graph_that_is_used_twice():
    """The second backward reads them again."""
    results = []
    for sharded in (False, True):
        torch.manual_seed(0)
        model = Chain()
        if sharded:
            unwall.shard(model, HOST)
        output = model(torch.ones(2, WIDTH))
        output.square().mean().backward(retain_graph=True)
        output.abs().mean().backward()
        results.append(model.first.weight.grad.clone())
    torch.testing.assert_close(results[0], results[1], rtol=1e-6, atol=0)


def updated_while_more_comes():
    """Whether parameters are those of an optimizer that does nothing ahead, where a group's gradients come one by one: an
    earlier backward awaited them, and checkpoints announce them again."""
    found = []
    for speculate in (False, True):
        torch.manual_seed(0)
        model = nn.ModuleList(nn.Linear(32, 32).requires_grad_(at % 2 == 0) for at in range(16))
        plan = unwall.Plan(compute_dtype=torch.float32, params="host", optimizer="host", device_bytes="1MiB")
        unwall.shard(model, plan)
        optimizer = unwall.AdamW([param for param in model.parameters() if param.requires_grad], lr=1e-2, speculate=speculate)
        for _ in range(4):
            x = torch.ones(2, 32, requires_grad=True)
            y = model[0](x)
            for layer in model[1:]:
                y = y + checkpoint(layer, y, use_reentrant=False).tanh()
            (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
            (slope.square().mean() + y.mean()).backward()
            optimizer.step()
            optimizer.zero_grad()
        with unwall.full_params(model):
            found.append([param.detach().clone() for param in model.parameters()])
    return all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_an_update_ahead_waits_for_all_of_a_gradient(ranks):
    assert ranks(2).run(updated_while_more_comes) == [True, True]
