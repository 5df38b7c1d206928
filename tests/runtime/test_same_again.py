"""Recomputed blocks that keep something from one call to the next: what they compute is what they computed, or an error."""

import random
from collections.abc import MutableMapping
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import nn
from transformers import MambaConfig, MambaForCausalLM

import unwall
from unwall.schedule.activations import everywhere
from unwall.schedule.observed import Observed


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x):
        return x + torch.tanh(self.inner(x))


class Stack(nn.Module):
    """Two blocks. What goes through them is what ``around`` makes of the input, and ``inside`` finds it there again."""

    def __init__(self, block, around=lambda x: x, inside=lambda x: x):
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.blocks = nn.ModuleList([block(), block()])
        self.around, self.inside = around, inside

    def forward(self, x):
        state = self.around(self.first(x))
        for block in self.blocks:
            state = block(state)
        return self.inside(state)


class Remembers(Block):
    """Its last result goes into the next one. There is none before the first call."""

    def forward(self, x):
        last = getattr(self, "last", None)
        result = super().forward(x if last is None else x * last)
        self.last = result.detach().mean(0)
        return result


class Counts(Block):
    """A number, a tensor that is written in place, and a generator of its own."""

    def __init__(self):
        super().__init__()
        self.calls, self.mean, self.source = 0, torch.ones(8), torch.Generator().manual_seed(3)

    def forward(self, x):
        self.calls += 1
        result = super().forward(x * self.calls * self.mean.clone() + torch.rand(8, generator=self.source))
        self.mean.mul_(0.5).add_(result.detach().mean(0))
        return result


class Draws(Block):
    def forward(self, x):
        return super().forward(x * random.random() + float(np.random.rand()))


class Replaces(Block):
    """An entry of what it was given."""

    def forward(self, state):
        state["x"] = super().forward(state["x"])
        state["seen"].append(state["x"].mean())
        return state


@dataclass
class State:
    x: torch.Tensor


class Sets(Block):
    def forward(self, state):
        state.x = super().forward(state.x)
        return state


def grads_of(make, activations):
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    model = make()
    unwall.shard(model, unwall.Plan(compute_dtype=torch.float32, activations=activations, device_bytes="1GiB"))
    for step in range(4):
        loss = model(torch.linspace(-1, 1 + step, 32).view(4, 8)).square().sum()
        loss.backward(retain_graph=True)
        loss.backward()
    return [param.grad.clone() for param in model.parameters()], random.random(), float(np.random.rand())


MAKERS = {
    "an attribute": lambda: Stack(Remembers),
    "counts": lambda: Stack(Counts),
    "random numbers": lambda: Stack(Draws),
    "a dictionary": lambda: Stack(Replaces, lambda x: {"x": x, "seen": []}, lambda state: state["x"] * sum(state["seen"])),
    "a dataclass": lambda: Stack(Sets, State, lambda state: state.x),
}


@pytest.mark.parametrize("activations", ["recompute", "auto"])
@pytest.mark.parametrize("what", MAKERS)
def test_a_block_finds_what_it_found_in_forward(what, activations, monkeypatch):
    monkeypatch.setattr(Observed, "best", lambda self, *_: everywhere("recompute", self.blocks))
    (kept, *drawn), (found, *drawn_then) = grads_of(MAKERS[what], "keep"), grads_of(MAKERS[what], activations)
    assert all(torch.equal(one, other) for one, other in zip(kept, found, strict=True))
    assert drawn == drawn_then


class Box:
    def __init__(self, x):
        self.x = x


def test_a_block_that_computes_something_else_again_is_an_error():
    """It changes an object of which nothing is known."""
    with pytest.raises(RuntimeError, match=r"a recomputed block \(Sets\) computes something else.*activations='keep'"):
        grads_of(lambda: Stack(Sets, Box, lambda state: state.x), "recompute")


class Store(MutableMapping):
    """A mapping whose shallow copies share what is inside."""

    def __init__(self, entries):
        self.entries = entries

    def __getitem__(self, name):
        return self.entries[name]

    def __setitem__(self, name, value):
        self.entries[name] = value

    def __delitem__(self, name):
        del self.entries[name]

    def __iter__(self):
        return iter(self.entries)

    def __len__(self):
        return len(self.entries)


class Tells(Block):
    """Leaves what it has computed in things that it was given, for others to look at."""

    def forward(self, x, box, store):
        result = super().forward(x)
        box.seen.append(result.detach())
        setattr(box, f"after_{len(box.seen)}", result)
        box.largest = torch.maximum(box.largest, result.detach().abs())
        store["seen"].append(float(result.detach().sum()))
        return result


class Telling(nn.Module):
    def __init__(self, seen):
        super().__init__()
        self.blocks, self.seen = nn.ModuleList([Tells(), Tells(), Tells()]), seen

    def forward(self, x):
        box = Box(None)
        box.seen, box.itself, box.largest = [], {}, torch.zeros(4, 8)
        box.itself["again"] = box.itself
        for block in self.blocks:
            x = block(x, box, store=Store({"seen": self.seen}))
        return x


def test_what_a_block_only_leaves_elsewhere_may_differ():
    seen = []
    kept, found = (grads_of(lambda: Telling(seen), activations)[0] for activations in ("keep", "recompute"))
    assert all(torch.equal(one, other) for one, other in zip(kept, found, strict=True))
    assert len(seen) >= 2 * 3 * 4  # what was given, and no copy of it


def test_nothing_is_done_for_a_block_that_writes_nothing():
    """After the first calls."""
    plan = unwall.Plan(compute_dtype=torch.float32, activations="recompute")
    model, calls = unwall.shard(Stack(Block), plan), []
    model.blocks[0].inner.register_forward_hook(lambda *_: calls.append(1))
    model.blocks[1].register_forward_hook(lambda *_: calls.append(1))
    for _ in range(3):
        model(torch.ones(4, 8)).sum().backward()
    assert calls == [1] * (3 * 2 + 2 + 1)  # again in backward: to the end in two of three, and only to the last saved tensor


@pytest.mark.parametrize("training", [True, False])
def test_the_state_of_a_recurrence_is_not_taken_for_an_input(training, monkeypatch):
    """A cache that the model fills in evaluation, and that backward would find full."""
    monkeypatch.setattr(Observed, "best", lambda self, *_: everywhere("recompute", self.blocks))
    tokens, found = torch.arange(12).view(2, 6), []
    for activations in ("keep", "auto"):
        torch.manual_seed(0)
        model = MambaForCausalLM(MambaConfig(hidden_size=16, num_hidden_layers=2, vocab_size=12, state_size=4)).train(training)
        unwall.shard(model, unwall.Plan(compute_dtype=torch.float32, activations=activations, device_bytes="1GiB"))
        for _ in range(3):
            model(tokens, labels=tokens, use_cache=True).loss.backward()
        found.append([param.grad.clone() for param in model.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_modules_that_torch_compile_has_made(monkeypatch):
    """A list of what ``torch.compile(block)`` gives, which has a length only where the block has one."""
    monkeypatch.setattr(Observed, "best", lambda self, *_: everywhere("recompute", self.blocks))
    found = []
    for activations in ("keep", "recompute", "auto"):
        torch._dynamo.reset()

        def make():
            return torch.compile(Block(), backend="aot_eager")

        found.append(grads_of(lambda: Stack(make), activations)[0])
    torch._dynamo.reset()
    for other in found[1:]:
        assert all(torch.equal(one, two) for one, two in zip(found[0], other, strict=True))
