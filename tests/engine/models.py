"""Small models, each with one thing about it that an engine could get wrong."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from reference import Case, mse
from torch import nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint
from transformers.modeling_outputs import BaseModelOutput

WIDTH = 16
VOCABULARY = 24


def linear():
    return nn.Linear(WIDTH, WIDTH)


class TiedNet(nn.Module):
    """The head's weight is the embedding's weight: one parameter with two names."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.body = linear()
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        return self.head(torch.tanh(self.body(self.embed(tokens))))


class BorrowingNet(nn.Module):
    """The parent reads a parameter of a child, whose forward ran long before."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.body = nn.Sequential(linear(), nn.Tanh(), linear(), nn.Tanh())

    def forward(self, tokens):
        return F.linear(self.body(self.embed(tokens)), self.embed.weight)


class NeverCalled(nn.Module):
    """Owns parameters that others read: its own forward never runs."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 4)

    def forward(self):
        raise AssertionError("not meant to be called")


class StoreNet(nn.Module):
    """A parameter held by a module that is never called, read in two places."""

    def __init__(self):
        super().__init__()
        self.store = NeverCalled()
        self.first, self.last = linear(), linear()

    def forward(self, x):
        x = torch.tanh(F.linear(self.first(x), self.store.weight))
        return self.last(x @ self.store.weight)


class RepeatNet(nn.Module):
    """One block called several times in one forward (as in ALBERT)."""

    def __init__(self):
        super().__init__()
        self.block = nn.Sequential(linear(), nn.Tanh())
        self.head = linear()

    def forward(self, x):
        for _ in range(4):
            x = self.block(x)
        return self.head(x)


class ScalarNet(nn.Module):
    """0-dim and empty parameters beside ordinary ones."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.nothing = nn.Parameter(torch.empty(0, WIDTH))
        self.body = linear()
        self.shift = nn.Parameter(torch.tensor(-0.2))

    def forward(self, x):
        return self.scale * self.body(torch.cat([x, self.nothing])) + self.shift


class NestedNet(nn.Module):
    """ModuleList, ModuleDict, Sequential, ParameterList and ParameterDict, nested."""

    def __init__(self):
        super().__init__()
        self.stages = nn.ModuleList(
            nn.ModuleDict({"mix": nn.Sequential(linear(), nn.Sequential(nn.Tanh(), linear())), "norm": nn.LayerNorm(WIDTH)})
            for _ in range(2)
        )
        self.gains = nn.ParameterList(torch.rand(WIDTH) for _ in range(2))
        self.extra = nn.ParameterDict({"bias": nn.Parameter(torch.zeros(WIDTH))})
        self.add_module("tail", nn.Sequential())
        self.tail.append(linear())

    def forward(self, x):
        for stage, gain in zip(self.stages, self.gains, strict=True):
            x = x + gain * stage["norm"](stage["mix"](x))
        return self.tail(x) + self.extra["bias"]


class AttentionNet(nn.Module):
    """nn.MultiheadAttention reads its out_proj's parameters itself."""

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.head = linear()

    def forward(self, x):
        x = x.unsqueeze(0)
        return self.head(x + self.attention(x, x, x, need_weights=False)[0]).squeeze(0)


class EncoderNet(nn.Module):
    """nn.TransformerEncoder: in evaluation it takes a fused path that reads all parameters at once."""

    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, 2, dim_feedforward=2 * WIDTH, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)

    def forward(self, x):
        return self.encoder(x.unsqueeze(0)).squeeze(0)


class RecurrentNet(nn.Module):
    """nn.LSTM keeps a list of its weights beside the module's parameters."""

    def __init__(self):
        super().__init__()
        self.cell = nn.LSTM(WIDTH, WIDTH, num_layers=2, batch_first=True)
        self.head = linear()

    def forward(self, x):
        return self.head(self.cell(x.unsqueeze(0))[0].squeeze(0))


class NormNet(nn.Module):
    """BatchNorm: buffers that change in forward."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.BatchNorm1d(WIDTH), nn.Tanh(), linear())

    def forward(self, x):
        return self.body(x)


class ParametrizedNet(nn.Module):
    """The weight is computed from other parameters each time it is read."""

    def __init__(self):
        super().__init__()
        self.first = parametrizations.weight_norm(linear())
        self.second = parametrizations.spectral_norm(linear())
        self.third = parametrizations.orthogonal(linear())

    def forward(self, x):
        return self.third(torch.tanh(self.second(torch.tanh(self.first(x)))))


class IndexNet(nn.Module):
    """An integer parameter, as quantised weights are, that is never trained."""

    def __init__(self):
        super().__init__()
        self.order = nn.Parameter(torch.randperm(WIDTH), requires_grad=False)
        self.body = linear()

    def forward(self, x):
        return self.body(x[:, self.order])


@dataclass
class Pair:
    left: torch.Tensor
    right: torch.Tensor


class OutputNet(nn.Module):
    """Inner modules that give tuples, dicts, dataclasses, lists inside dicts, and ModelOutput."""

    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleList(Give(kind) for kind in ("tuple", "dict", "dataclass", "nested", "output"))

    def forward(self, x):
        total = x
        for part in self.parts:
            out = part(torch.tanh(total))
            if part.kind == "tuple":
                total = out[0] + out[1]
            elif part.kind == "dict":
                total = out["left"] + out["right"]
            elif part.kind == "dataclass":
                total = out.left + out.right
            elif part.kind == "nested":
                total = out["all"][0]["left"] + out["all"][1][0]
            else:
                total = out.last_hidden_state + out.hidden_states[0]
        return total


class Give(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.left, self.right = (nn.Parameter(torch.randn(WIDTH, WIDTH) / 4) for _ in range(2))

    def forward(self, x):
        left, right = x @ self.left, x @ self.right
        if self.kind == "tuple":
            return left, right, None, 3
        if self.kind == "dict":
            return {"left": left, "right": right}
        if self.kind == "dataclass":
            return Pair(left, right)
        if self.kind == "nested":
            return {"all": [{"left": left}, (right, "text")]}
        return BaseModelOutput(last_hidden_state=left, hidden_states=(right,))


class CheckpointNet(nn.Module):
    """Activation checkpointing; ``nested``: one within another. Recomputing must repeat the dropout."""

    use_reentrant = False
    nested = False

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(linear(), nn.Dropout(0.2), nn.Tanh(), linear()) for _ in range(4))

    def forward(self, x):
        x = x.clone().requires_grad_()  # the reentrant kind needs an input with a gradient
        for pair in (self.blocks[:2], self.blocks[2:]):
            x = checkpoint(self.pair, pair, x, use_reentrant=self.use_reentrant)
        return x

    def pair(self, blocks, x):
        for block in blocks:
            x = x + (checkpoint(block, x, use_reentrant=self.use_reentrant) if self.nested else block(x))
        return x


class ReentrantNet(CheckpointNet):
    use_reentrant = True


class NestedCheckpointNet(CheckpointNet):
    nested = True


class NestedReentrantNet(ReentrantNet):
    nested = True


def tokens():
    return torch.randint(VOCABULARY, (4, 6)), torch.randint(VOCABULARY, (4, 6))


def token_loss(model, batch):
    inputs, target = batch
    return F.cross_entropy(model(inputs).flatten(0, 1), target.flatten())


def autocast_loss(model, batch):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return mse(model, batch)


TOKEN_NETS = (TiedNet, BorrowingNet)
VECTOR_NETS = (
    StoreNet,
    RepeatNet,
    ScalarNet,
    NestedNet,
    AttentionNet,
    EncoderNet,
    RecurrentNet,
    NormNet,
    ParametrizedNet,
    IndexNet,
    OutputNet,
    CheckpointNet,
    ReentrantNet,
    NestedCheckpointNet,
    NestedReentrantNet,
)
CASES = {net.__name__: Case(build=net, batch=tokens, loss=token_loss) for net in TOKEN_NETS}
CASES |= {net.__name__: Case(build=net) for net in VECTOR_NETS}
CASES |= {f"{net.__name__}-autocast": Case(build=net, loss=autocast_loss) for net in (RepeatNet, CheckpointNet)}
