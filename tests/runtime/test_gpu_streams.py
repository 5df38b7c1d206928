"""A model that computes its branches on several CUDA streams, as plain PyTorch allows it."""

import pytest
import torch
from torch import nn

import unwall
from unwall.plans import Plan

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an accelerator")]

WIDTH = 1024
LONG = 40_000_000
"""Cycles: some twenty milliseconds, in which a stream that does not wait gets far ahead."""


class Late(torch.autograd.Function):
    """What comes behind it is late, on whatever stream that is."""

    @staticmethod
    def forward(ctx, x, forward, backward):
        ctx.cycles = backward
        torch.cuda._sleep(forward)
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        torch.cuda._sleep(ctx.cycles)
        return grad.clone(), None, None


class Branches(nn.Module):
    """Two branches, of which one is on a stream of its own. ``late``: which of them is."""

    def __init__(self, width, late="neither", streams=True):
        super().__init__()
        self.left, self.right = (nn.ModuleList(nn.Linear(width, width) for _ in range(3)) for _ in range(2))
        self.late, self.streams = late, streams
        self.side = torch.cuda.Stream()

    def walk(self, layers, x, late):
        x = Late.apply(x, LONG * late, 0)
        for layer in layers:
            x = torch.tanh(layer(x))
        return Late.apply(x, 0, LONG * late)

    def forward(self, x):
        if not self.streams:
            return self.walk(self.left, x, 0) + self.walk(self.right, x, 0)
        here = torch.cuda.current_stream()
        self.side.wait_stream(here)
        with torch.cuda.stream(self.side):
            left = self.walk(self.left, x, self.late == "left")
        right = self.walk(self.right, x, self.late == "right")
        here.wait_stream(self.side)
        left.record_stream(here)
        return left + right


def train(model, plan, steps=3):
    if plan is None:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    else:
        unwall.shard(model, plan)
        optimizer = unwall.AdamW(model.parameters(), lr=1e-3)
    generator = torch.Generator("cuda").manual_seed(3)
    losses = []
    for _ in range(steps):
        x = torch.randn(64, model.left[0].in_features, device="cuda", generator=generator)
        loss = model(x).square().mean()
        loss.backward()
        losses.append(float(loss))
        optimizer.step()
        optimizer.zero_grad()
    return losses, {name: value.cpu() for name, value in model.state_dict().items()}


HOST = {"params": "host", "optimizer": "host", "compute_dtype": torch.float32}
CASES = {
    "plain": (1024, None),
    "resident": (1024, Plan(compute_dtype=torch.float32)),
    "one group": (96, Plan(compute_dtype=torch.float32)),
    "host": (1024, Plan(**HOST)),
    "groups come and go": (1024, Plan(**HOST, device_bytes=18 << 20)),
    "tiles": (1024, Plan(**HOST, device_bytes=10 << 20)),
}


@pytest.mark.parametrize("late", ["left", "right"])
@pytest.mark.parametrize("name", CASES)
def test_branches_on_streams_of_their_own(name, late):
    width, plan = CASES[name]
    torch.manual_seed(0)
    model, other = Branches(width, late), Branches(width, streams=False)
    other.load_state_dict(model.state_dict())
    losses, values = train(model if plan is not None and plan.params == "host" else model.cuda(), plan)
    expected, wanted = train(other.cuda(), None)
    assert losses == pytest.approx(expected, rel=1e-4)
    for key, value in values.items():
        torch.testing.assert_close(value, wanted[key], rtol=1e-3, atol=1e-5)
