"""What ``fuzz.resume``, ``fuzz.elastic`` and ``fuzz.moves`` train: a small model with what a checkpoint must keep, and how.

Dropout and batch norm, a scale without dimensions, schedulers, averages, a loss scale, all kinds of optimizers, adapters.
"""

import random
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from offload import named_budget
from torch import nn

import unwall
from unwall.optim.ema import Ema
from unwall.plans import Plan, PlanError

VOCABULARY = 64
REFUSALS = 14
"""At most so many, each of which names a larger budget, before a plan is accepted."""

TIERS = {
    "auto": {},
    "host": {"params": "host", "optimizer": "host"},
    "device": {"params": "device", "optimizer": "device"},
    "device and host": {"params": "device", "optimizer": "host"},
    "host and disk": {"params": "host", "optimizer": "disk"},
    "disk": {"params": "disk", "grads": "disk", "optimizer": "disk"},
}


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Adapted(nn.Module):
    """A layer, frozen, with a small one of low rank beside it."""

    def __init__(self, base):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.narrow, self.wide = nn.Linear(base.in_features, 4, bias=False), nn.Linear(4, base.out_features, bias=False)

    def forward(self, x):
        return self.base(x) + self.wide(self.narrow(x))


class Network(nn.Module):
    def __init__(self, width=32, blocks=4, vocabulary=VOCABULARY, tied=False, batch_norm=False):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.norm, self.dropout = nn.LayerNorm(width), nn.Dropout(0.1)
        self.batch_norm = nn.BatchNorm1d(width) if batch_norm else None
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.scale = nn.Parameter(torch.ones(()))
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        x = self.dropout(self.norm(x)) * self.scale
        if self.batch_norm is not None:
            x = self.batch_norm(x.transpose(1, 2)).transpose(1, 2)
        return self.head(x)


def adapt(model):
    for block in model.blocks:
        block.up = Adapted(block.up)


def is_norm(name, param):
    return "norm" in name


@dataclass(frozen=True, kw_only=True)
class Keeping:
    """A model, an optimizer, and a plan without its budgets."""

    seed: int
    tied: bool
    batch_norm: bool
    frozen: bool
    adapters: bool
    optimizer: str
    """A key of OPTIMIZERS, or "AdamW"."""
    clip: float | None
    skips: bool
    """``skip_nonfinite``."""
    in_backward: bool
    """AdamW with ``update_in_backward``."""
    speculate: bool | str
    schedules: bool
    averages: str | None
    """An average (``ema``) made "before" or "after" the optimizer. Or None."""
    fields: tuple[tuple[str, object], ...]
    """Of the plan."""
    needs_disk: bool
    block: bool
    """A save ends before training goes on."""
    shares: tuple[float, float] | None
    """How far above the smallest budgets those of device and host are. None: no budgets."""

    @property
    def passes(self):
        return dict(self.fields)["passes"]

    @property
    def scales(self):
        """fp16 needs a loss scale."""
        return dict(self.fields)["compute_dtype"] == torch.float16

    def plan_fields(self, folder):
        return dict(self.fields) | ({"disk": Path(folder)} if self.needs_disk else {})


def draw(seed):
    rng = random.Random(f"{seed}-keeping")
    dtype = rng.choice((torch.bfloat16,) * 3 + (torch.float32, torch.float16))
    optimizer = rng.choice(("AdamW",) * 4 + tuple(OPTIMIZERS))
    clip = rng.choice((None, None, 0.5, 1e3))
    in_backward = optimizer == "AdamW" and clip is None and dtype != torch.float16 and rng.random() < 0.35
    fields = draw_fields(rng, dtype, optimizer, in_backward)
    speculate = rng.choice((True, True, False, "shadows", "journal"))
    return Keeping(
        seed=seed,
        tied=rng.random() < 0.5,
        batch_norm=rng.random() < 0.3,
        frozen=rng.random() < 0.3,
        adapters=rng.random() < 0.2,
        optimizer=optimizer,
        clip=clip,
        skips=not in_backward and rng.random() < 0.2,
        in_backward=in_backward,
        speculate=True if speculate == "journal" and fields.get("states") == "lean" else speculate,
        schedules=rng.random() < 0.5,
        averages=rng.choice((None,) * 6 + ("before", "after")),
        fields=tuple(fields.items()),
        needs_disk="disk" in fields.values() or rng.random() < 0.3,
        block=rng.random() < 0.5,
        shares=(spare(rng), spare(rng)) if rng.random() < 0.6 else None,
    )


def draw_fields(rng, dtype, optimizer, in_backward):
    fields = {"compute_dtype": dtype, "passes": 1 if in_backward else rng.choice((1, 1, 1, 2))}
    fields |= TIERS[rng.choice(tuple(TIERS))]
    if in_backward and "grads" not in fields and rng.random() < 0.5:
        fields["grads"] = "transient"
    if dtype == torch.bfloat16 and optimizer == "AdamW" and rng.random() < 0.35:
        fields["states"] = "lean"
    if rng.random() < 0.3:
        fields["keep_fp32"] = is_norm
    fields["tiles"] = rng.choice((None, None, 2))
    fields["activations"] = rng.choice(("auto", "keep", "recompute", "host"))
    return fields


def spare(rng):
    """Often nothing: the smallest budget itself."""
    return max(0.0, rng.random() - 0.3)


def build(keeping, seed=0):
    torch.manual_seed(seed)
    model = Network(tied=keeping.tied, batch_norm=keeping.batch_norm)
    if keeping.adapters:
        adapt(model)
    if keeping.frozen:
        model.blocks[1].requires_grad_(False)
        model.blocks[2].up.requires_grad_(False)
        model.embed.weight.requires_grad_(keeping.tied)
    return model


OPTIMIZERS = {
    "RMSprop": lambda groups: torch.optim.RMSprop(groups, lr=1e-3, centered=True, momentum=0.9),
    "SGD": lambda groups: torch.optim.SGD(groups, lr=1e-2, momentum=0.9, nesterov=True),
    "AMSGrad": lambda groups: torch.optim.AdamW(groups, lr=1e-3, amsgrad=True),
    "NAdam": lambda groups: torch.optim.NAdam(groups, lr=1e-3),
    "Adagrad": lambda groups: torch.optim.Adagrad(groups, lr=1e-2),
}


def optimizer_of(keeping, model):
    params = [param for param in model.parameters() if param.requires_grad]
    groups = [
        {"params": [param for param in params if param.dim() > 1], "weight_decay": 0.1},
        {"params": [param for param in params if param.dim() <= 1], "weight_decay": 0.0},
    ]
    options = {"max_grad_norm": keeping.clip, "skip_nonfinite": keeping.skips}
    if keeping.optimizer != "AdamW":
        return unwall.wrap(OPTIMIZERS[keeping.optimizer](groups), **options)
    early = {"update_in_backward": keeping.in_backward, "speculate": keeping.speculate}
    return unwall.AdamW(groups, lr=1e-2, **early, **options)


@dataclass
class Training:
    """All that a run has."""

    keeping: Keeping
    model: nn.Module
    optimizer: torch.optim.Optimizer
    average: Ema | None
    schedule: torch.optim.lr_scheduler.LRScheduler | None

    def step(self, draw_tokens):
        """``draw_tokens(number)``: of each pass."""
        for number in range(self.keeping.passes):
            tokens = draw_tokens(number)
            loss = F.cross_entropy(self.model(tokens).float().flatten(0, 1), tokens.flatten())
            (self.optimizer.scale(loss) if self.keeping.scales else loss).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        for other in (self.schedule, self.average):
            if other is not None:
                (other.step if other is self.schedule else other.update)()

    def extra(self):
        """What a checkpoint keeps beside model and optimizer."""
        return {
            name: part.state_dict()
            for name, part in (("schedule", self.schedule), ("average", self.average))
            if part is not None
        }

    def load_extra(self, extra):
        for name, part in (("schedule", self.schedule), ("average", self.average)):
            if part is not None:
                part.load_state_dict(extra[name])

    def outcome(self):
        """All values by name, detached from the model."""
        found = {name: torch.as_tensor(value).clone() for name, value in self.model.state_dict().items()}
        for number, entry in self.optimizer.state_dict()["state"].items():
            found |= {f"state.{number}.{name}": as_tensor(value) for name, value in entry.items()}
        if self.average is not None:
            found |= {f"average.{name}": value.clone() for name, value in self.average.state_dict()["params"].items()}
        return found


def as_tensor(value):
    """Of an optimizer's state, where not everything is a tensor."""
    if isinstance(value, (int, float, torch.Tensor)):
        return torch.as_tensor(value).clone()
    return torch.tensor(list(repr(value).encode()))


def begin(keeping, fields, seed=0):
    """Shards a new model. ``seed``: of its first values."""
    model = unwall.shard(build(keeping, seed), Plan(**fields))
    average = unwall.ema(model, 0.9) if keeping.averages == "before" else None
    optimizer = optimizer_of(keeping, model)
    average = unwall.ema(model, 0.9) if keeping.averages == "after" else average
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.7) if keeping.schedules else None
    return Training(keeping, model, optimizer, average, schedule)


def raised(refusal, budgets):
    """Budgets with what a refusal names, which must be more than what it refused."""
    name, needed_bytes = named_budget(refusal)
    if needed_bytes <= budgets.get(name, 0):
        raise AssertionError(f"the named budget is no larger than the refused one, {budgets}: {refusal}") from refusal
    return {**budgets, name: needed_bytes}


def until_accepted(attempt, budgets):
    """Calls ``attempt(budgets)`` until it is not refused, each time with what the refusal names: its result, and the budgets."""
    said = []
    for _ in range(REFUSALS):
        try:
            return attempt(budgets), budgets
        except PlanError as error:
            budgets = raised(error, budgets)
            said.append(str(error))
    raise AssertionError(f"refused {REFUSALS} times, each with what the one before named: {said[-1]}")


def tight_budgets(keeping, fields):
    """The smallest budgets that are accepted, one tier after the other, and a share above."""
    budgets = {}
    for name, share in zip(("device_bytes", "host_bytes"), keeping.shares or (), strict=False):
        try:
            unwall.shard(build(keeping), Plan(**fields, **budgets, **{name: 1}))
        except PlanError as error:
            named = raised(error, {})
            if name in named:
                budgets[name] = int(named[name] * (1 + share))
    return until_accepted(lambda tried: unwall.shard(build(keeping), Plan(**fields, **tried)), budgets)[1]
