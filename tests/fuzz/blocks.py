"""The models of ``fuzz.ranks``: a chain of unlike blocks that each rank may go through in its own way."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

WIDTH = 32
VOCABULARY = 48


class Tick(Exception):
    """What a model raises where the script has it fail."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A model."""

    kinds: tuple[str, ...]
    """Of its blocks: keys of KINDS, or "experts"."""
    experts: int
    """In each block of experts."""
    checkpoints: tuple[str | None, ...]
    """Of each block: None, "reentrant" or "other" checkpointing."""
    frozen: tuple[int, ...]
    """Blocks that are not trained."""
    head: str
    """"own", "tied" to the embedding, or "functional": the embedding's weight in a call of ``F.linear``."""
    unused: bool
    """With a layer that no forward uses."""
    penalty: str | None
    """The loss has the gradient of a gradient, with respect to the "embedded" tokens, or to those "detached". Or None."""


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Adapter(nn.Module):
    """A frozen layer with a small one of low rank beside it."""

    def __init__(self):
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.narrow, self.wide = nn.Linear(WIDTH, 3, bias=False), nn.Linear(3, WIDTH, bias=False)

    def forward(self, x):
        return x + torch.tanh(self.base(x) + self.wide(self.narrow(x)))


class Twice(nn.Module):
    """One layer used twice."""

    def __init__(self):
        super().__init__()
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x):
        return x + 0.5 * self.linear(torch.tanh(self.linear(self.norm(x))))


class Raw(nn.Module):
    """Parameters of its own beside those of a layer."""

    def __init__(self):
        super().__init__()
        self.weight, self.scale = nn.Parameter(torch.randn(WIDTH, WIDTH) / 8), nn.Parameter(torch.ones(WIDTH))
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return x * self.scale.to(x.dtype) + self.inner(torch.tanh(F.linear(x, self.weight.to(x.dtype))))


class Big(nn.Module):
    """Larger than all the others."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 8 * WIDTH), nn.Linear(8 * WIDTH, WIDTH)

    def forward(self, x):
        return x + 0.3 * self.down(torch.tanh(self.up(x)))


class Experts(nn.Module):
    """Uses the experts that it is told to: other ones on other ranks, or none."""

    def __init__(self, count):
        super().__init__()
        self.each = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(count))
        self.router = nn.Linear(WIDTH, count)

    def forward(self, x, picked):
        gates, out = self.router(x).softmax(-1), x
        for at in picked:
            out = out + torch.tanh(self.each[at](x)) * gates[..., at : at + 1]
        return out


KINDS = {"mlp": Mlp, "adapter": Adapter, "twice": Twice, "raw": Raw, "big": Big}


class ChainOfBlocks(nn.Module):
    def __init__(self, shape):
        super().__init__()
        self.shape = shape
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.head = None if shape.head == "functional" else nn.Linear(WIDTH, VOCABULARY, bias=False)
        if shape.head == "tied":
            self.head.weight = self.embed.weight
        self.blocks = nn.ModuleList(Experts(shape.experts) if kind == "experts" else KINDS[kind]() for kind in shape.kinds)
        self.unused = nn.Linear(WIDTH, WIDTH) if shape.unused else None
        for at in shape.frozen:
            self.blocks[at].requires_grad_(False)
        self.fails = None
        """Where the next pass fails: "forward", "backward" or nowhere."""

    def forward(self, tokens, way):
        """The loss, what the blocks gave, and what they got."""
        x = self.embed(tokens)
        start = x = x.detach().requires_grad_() if self.shape.penalty == "detached" else x
        for number, at in enumerate(way.order):
            if number == way.fails_at:
                self.fail(x)
            x = self.call(at, x, way.experts[number])
        if not way.order:
            self.fail(x)
        logits = F.linear(x, self.embed.weight) if self.head is None else self.head(x)
        return F.cross_entropy(logits.float().flatten(0, 1), tokens.flatten()), x, start

    def call(self, at, x, picked):
        block, how = self.blocks[at], self.shape.checkpoints[at]
        args = (x, picked) if isinstance(block, Experts) else (x,)
        return block(*args) if how is None else checkpoint(block, *args, use_reentrant=how == "reentrant")

    def fail(self, x):
        if self.fails == "forward":
            raise Tick(self.fails)
        if self.fails == "backward" and x.requires_grad:
            x.register_hook(fail_in_backward)


def fail_in_backward(_):
    raise Tick("backward")


def build(shape, seed):
    torch.manual_seed(seed)
    return ChainOfBlocks(shape)
