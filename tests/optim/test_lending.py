"""Memory that was taken for an update ahead of the step, by a thread that was interrupted before it lent it to one."""

import threading

import pytest
import torch
from torch import nn

import unwall
from unwall.optim import early
from unwall.optim.lending import Lendable, take_idle


class Memory(Lendable):
    def held(self):
        return []


def test_whoever_was_interrupted_finds_it_idle_again():
    memory, seen = Memory(), []
    other = threading.Thread(target=lambda: seen.append(memory.idle))
    other.start()
    other.join()
    assert seen == [False]  # another thread cannot know
    assert take_idle([memory]) is memory


def test_a_step_that_was_interrupted_keeps_no_shadow(monkeypatch):
    """The next backward updates as many groups ahead as the one before."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    unwall.shard(model, unwall.Plan(params="host", optimizer="host", device_bytes="1MiB", compute_dtype=torch.float32))
    optimizer = unwall.AdamW(model.parameters(), lr=1e-2, speculate="shadows")
    engine, real = unwall.api.engine(model), early.Speculation

    def speculated():
        began = []
        monkeypatch.setattr(early, "Speculation", lambda *args: began.append(args) or real(*args))
        model(torch.ones(2, 64)).sum().backward()
        optimizer.step()
        engine.finish()
        return len(began)

    def interrupted(*_):
        raise KeyboardInterrupt

    for _ in range(3):
        before = speculated()
    assert before
    monkeypatch.setattr(early, "Speculation", interrupted)
    with pytest.raises(KeyboardInterrupt):
        model(torch.ones(2, 64)).sum().backward()
    optimizer.zero_grad()
    speculated()
    assert speculated() == before
