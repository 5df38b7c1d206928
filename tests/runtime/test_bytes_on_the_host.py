"""What ``activations="host"`` leaves on the device, counted: no more than is on its way, and one block."""

import gc

import pytest
import torch
from counted_card import put_in
from torch import nn

import unwall
from unwall.runtime import saved_on_host

ROWS, WIDTH = 64, 256
INPUT_BYTES = 4 * ROWS * WIDTH
RING_BYTES = 2 * INPUT_BYTES


@pytest.fixture(autouse=True)
def a_small_ring(monkeypatch):
    monkeypatch.setattr(saved_on_host, "MIN_BYTES", 1)
    monkeypatch.setattr(saved_on_host, "IN_FLIGHT_BYTES", RING_BYTES)
    monkeypatch.setattr(saved_on_host, "AHEAD_BYTES", RING_BYTES)


class Block(nn.Module):
    """Its output is a view the other way round of what it computed; what all blocks are given is given to each by name."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x, *, shared):
        found = self.down(torch.tanh(self.up(x)) * torch.tanh(x)) + shared
        return found.t().contiguous().t()


class Stack(nn.Module):
    def __init__(self, blocks):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))

    def forward(self, x):
        shared = torch.sin(x)
        for block in self.blocks:
            x = block(x, shared=shared)
        return x


def peak_of(card, blocks, activations, keep=False):
    """The most that was on the device in the second step, and the gradients."""
    gc.collect()  # the model before this one, in a circle with its hooks, and what they keep
    torch.manual_seed(0)
    model = Stack(blocks)
    inputs = []
    if keep:  # someone looks at what a block was given
        model.blocks[1].register_forward_pre_hook(lambda _, args: inputs.append(args[0]))
    plan = {"params": "host", "optimizer": "host", "compute_dtype": torch.float32}
    unwall.shard(model, unwall.Plan(**plan, activations=activations, device_bytes="64MiB"))
    x = torch.linspace(-1, 1, ROWS * WIDTH).view(ROWS, WIDTH)
    for _ in range(2):
        model.zero_grad()
        inputs.clear()
        unwall.api.engine(model).executor.drop_cache()
        card.most_bytes = 0
        with card:
            model(x).square().mean().backward()
    return card.most_bytes, [param.grad.clone() for param in model.parameters()]


@pytest.mark.parametrize("keep", [False, True])
def test_what_is_on_the_device_does_not_grow_with_the_blocks(keep, monkeypatch):
    card = put_in(monkeypatch)
    (few, _), (many, expected) = (peak_of(card, blocks, "recompute", keep) for blocks in (8, 16))
    assert many - few >= 8 * INPUT_BYTES  # of each block its input
    (few_moved, _), (many_moved, found) = (peak_of(card, blocks, "host", keep) for blocks in (8, 16))
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    assert many_moved <= few_moved + INPUT_BYTES
    # All inputs less what is on its way out and back, the one of the block at work, and what all blocks share. One that someone
    # keeps stays as well, beside the copy that comes back.
    staying = 4 * INPUT_BYTES if keep else 2 * INPUT_BYTES
    assert many_moved <= many - (16 * INPUT_BYTES - 2 * RING_BYTES - staying)
