"""What the scripts of habit_scripts*.py share: a small model, its batches, and how a script is found.

A script gets a kit that makes models and optimizers, and gives the tensors that matter: with plain PyTorch and sharded.
"""

import torch
import torch.nn.functional as F
from torch import nn

WIDTH = 12


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4)

    def features(self, x):
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return self.norm(x)

    def forward(self, x):
        return self.head(self.features(x))


def net(seed=0):
    torch.manual_seed(seed)
    return Net()


def batch(step, rows=6):
    draw = torch.Generator().manual_seed(100 + step)
    return torch.randn(rows, WIDTH, generator=draw), torch.randn(rows, 4, generator=draw)


def loss_of(model, step=0):
    x, y = batch(step)
    return F.mse_loss(model(x).float(), y)


def fit(model, optimizer, steps=2, start=0):
    for step in range(start, start + steps):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()


def values(*models):
    return [p.detach().float().clone() for model in models for p in model.parameters()]


def scripts_of(namespace):
    """The functions of a module whose only argument is the kit, by name."""
    own = ((name, found) for name, found in namespace.items() if getattr(found, "__module__", "") == namespace["__name__"])
    return {
        name: found for name, found in own if getattr(found, "__code__", None) and found.__code__.co_varnames[:1] == ("kit",)
    }
