"""Small models, each with one thing about it that an engine could get wrong."""

import torch
import torch.nn.functional as F
from reference import Case, mse
from torch import nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

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


class StridedNet(nn.Module):
    """Parameters that are not contiguous: transposed, a row of a matrix, channels last."""

    def __init__(self):
        super().__init__()
        self.mix = nn.Parameter((torch.randn(WIDTH, WIDTH) / 4).t())
        self.gain = nn.Parameter(torch.randn(2, WIDTH).select(0, 1))
        self.conv = nn.Conv2d(4, 4, 3, padding=1).to(memory_format=torch.channels_last)

    def forward(self, x):
        return self.conv((x @ self.mix * self.gain).view(-1, 4, 2, 2)).flatten(1)


class SharedNet(nn.Module):
    """One module under several names."""

    def __init__(self):
        super().__init__()
        block = nn.Sequential(linear(), nn.Tanh())
        self.blocks = nn.ModuleList([block, block, linear(), block])
        self.last = block

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.last(x)


class PromptNet(nn.Module):
    """Modules whose output is their parameter, or a view of it."""

    def __init__(self):
        super().__init__()
        self.whole, self.turned = Prompt(), Prompt()
        self.body = linear()

    def forward(self, x):
        whole, turned = self.whole(), self.turned().t()
        return self.body(torch.tanh(x @ whole) @ turned) @ whole


class Prompt(nn.Module):
    """Gives its parameter to whoever calls it."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 4)

    def forward(self):
        return self.weight


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
    StridedNet,
    SharedNet,
    PromptNet,
    CheckpointNet,
    ReentrantNet,
    NestedCheckpointNet,
    NestedReentrantNet,
)
CASES = {net.__name__: Case(build=net, batch=tokens, loss=token_loss) for net in TOKEN_NETS}
CASES |= {net.__name__: Case(build=net) for net in VECTOR_NETS}
CASES |= {f"{net.__name__}-autocast": Case(build=net, loss=autocast_loss) for net in (RepeatNet, CheckpointNet)}
