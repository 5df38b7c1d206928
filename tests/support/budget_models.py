"""Small models whose order of use has little to do with the order in which their modules are registered."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

VOCABULARY, WIDTH = 40, 32


class Block(nn.Module):
    """Attention, whose forward reads the parameters of its child, and two linear layers."""

    def __init__(self, width=WIDTH):
        super().__init__()
        self.down, self.up = nn.Linear(2 * width, width), nn.Linear(width, 2 * width)  # used in the other order
        self.norm = nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True)

    def forward(self, x):
        y = self.norm(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + self.down(F.gelu(self.up(x)))


class Model(nn.Module):
    """An embedding, a middle part, and a head that may be tied to the embedding, by name or by a functional use."""

    def __init__(self, head="own"):
        super().__init__()
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False) if head != "functional" else None
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        if head == "tied":
            self.head.weight = self.embed.weight

    def forward(self, ids):
        x = self.middle(self.embed(ids))
        return F.linear(x, self.embed.weight) if self.head is None else self.head(x)


class Chain(Model):
    def __init__(self, layers, recompute=None, **options):
        super().__init__(**options)
        self.layers = nn.ModuleList(reversed([Block() for _ in range(layers)]))
        self.recompute = recompute

    def middle(self, x):
        for layer in self.layers:
            again = self.recompute == "reentrant"
            x = layer(x) if self.recompute is None else checkpoint(layer, x, use_reentrant=again)
        return x


class Repeated(Model):
    """One block, used again and again: its gradients come at the very end."""

    def __init__(self, times):
        super().__init__()
        self.block, self.times = Block(), times

    def middle(self, x):
        for _ in range(self.times):
            x = self.block(x)
        return x


class Interleaved(Model):
    """Branches that advance together."""

    def __init__(self, branches, layers):
        super().__init__()
        self.branches = nn.ModuleList(nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(layers)) for _ in range(branches))

    def middle(self, x):
        states = [x] * len(self.branches)
        for layers in zip(*self.branches, strict=True):
            states = [torch.tanh(layer(state)) for layer, state in zip(layers, states, strict=True)]
        return sum(states)


class Parallel(Model):
    """Branches one after the other, joined at the end, and outputs of each layer."""

    def __init__(self, branches, layers):
        super().__init__()
        self.branches = nn.ModuleList(
            nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(layers)]) for _ in range(branches)
        )

    def middle(self, x):
        return x + sum(branch(x) for branch in self.branches)


class Skips(Model):
    """Down and up again, with connections between."""

    def __init__(self, layers):
        super().__init__()
        self.down = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(layers))
        self.up = nn.ModuleList(nn.Linear(2 * WIDTH, WIDTH) for _ in range(layers))

    def middle(self, x):
        kept = []
        for layer in self.down:
            x = torch.relu(layer(x))
            kept.append(x)
        for layer in self.up:
            x = torch.relu(layer(torch.cat([x, kept.pop()], -1)))
        return x


class Recurrent(Model):
    def __init__(self, layers):
        super().__init__()
        self.cells = nn.ModuleList(nn.GRUCell(WIDTH, WIDTH) for _ in range(layers))

    def middle(self, x):
        states = [x.new_zeros(x.shape[0], WIDTH) for _ in self.cells]
        found = []
        for y in x.unbind(1):
            for index, cell in enumerate(self.cells):
                states[index] = y = cell(y, states[index])
            found.append(y)
        return torch.stack(found, 1)


class Nested(Model):
    """Parameters at every height: the groups of all calls around one are read at once."""

    def __init__(self, depth):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(64, WIDTH))
        self.inside = Shell(depth)

    def middle(self, x):
        return self.inside(x * self.scale[: x.shape[1]].to(x.dtype))


class Shell(nn.Module):
    def __init__(self, depth):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3 * WIDTH, WIDTH) / 8)
        self.inside = Shell(depth - 1) if depth else nn.Identity()

    def forward(self, x):
        return x + F.linear(self.inside(x), self.weight).view(*x.shape, 3).mean(-1)


class Experts(Model):
    """Each token goes through the expert that a router names: every batch, and every rank, in its own way."""

    def __init__(self, experts):
        super().__init__()
        self.router = nn.Linear(WIDTH, experts)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(experts))

    def middle(self, x):
        shares = self.router(x).float().softmax(-1)
        chosen, out = shares.argmax(-1), torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            mine = chosen == index
            if mine.any():
                out[mine] = expert(x[mine]) * shares[mine][:, index : index + 1].to(x.dtype)
        return x + out


def frozen(layers):
    model = Chain(layers)
    for layer in list(model.layers)[::2]:
        layer.requires_grad_(False)
    return model


def adapted(layers):
    """A frozen model with small parts that are trained, as LoRA has them."""
    model = Chain(layers)
    model.requires_grad_(False)
    for layer in model.layers:
        layer.up = nn.Sequential(layer.up, nn.Linear(2 * WIDTH, 4), nn.Linear(4, 2 * WIDTH))
    return model


KINDS = {
    "chain": lambda size: Chain(size),
    "tied": lambda size: Chain(size, head="tied"),
    "functional": lambda size: Chain(size, head="functional"),
    "checkpoint": lambda size: Chain(size, recompute="plain"),
    "reentrant": lambda size: Chain(size, recompute="reentrant"),
    "repeated": lambda size: Repeated(size),
    "interleaved": lambda size: Interleaved(size, 3),
    "parallel": lambda size: Parallel(size, 2),
    "skips": lambda size: Skips(size),
    "recurrent": lambda size: Recurrent(size),
    "nested": lambda size: Nested(size),
    "experts": lambda size: Experts(2 * size),
    "frozen": frozen,
    "adapted": adapted,
}


def build(kind, size):
    torch.manual_seed(size)
    return KINDS[kind](size)


def loss_of(model, ids):
    return F.cross_entropy(model(ids).float().flatten(0, 1), ids.flatten())
