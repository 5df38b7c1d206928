"""Training runs for the offload tests: one small model, one loop, any placement. What they give is compared bit by bit."""

import contextlib
import re
from dataclasses import dataclass

import pytest
import torch
from ranks import rank_and_world
from torch import nn

import unwall
from unwall.plans import Plan, PlanError
from unwall.runtime import resources
from unwall.shards import working

WIDTH = 64
DEVICE = {"params": "device", "optimizer": "device"}
HOST = {"params": "host", "optimizer": "host"}
DISK = {"params": "disk", "grads": "disk", "optimizer": "disk"}
STATE_BYTES = {torch.float32: 16, torch.bfloat16: 14, torch.float16: 16}
"""Parameter, gradient, master and moments of one parameter."""


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What is trained, apart from where its states live."""

    stage: int = 3
    dtype: torch.dtype = torch.bfloat16
    clip: float | None = None
    passes: int = 1
    no_sync: bool = False
    """All passes but the last one of a step inside ``unwall.no_sync``."""
    frozen: bool = False
    speculate: bool = True
    """Updates may run ahead of their step."""
    steps: int = 3
    blocks: int = 10


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(width), nn.Linear(width, width)

    def forward(self, x):
        return x + torch.tanh(self.linear(self.norm(x)))


def build(frozen=False, blocks=10, width=WIDTH):
    torch.manual_seed(0)
    model = nn.Sequential(*[Block(width) for _ in range(blocks)], nn.Linear(width, 8))
    if frozen:
        model[1].requires_grad_(False)
        model[blocks // 2].linear.weight.requires_grad_(False)
        model[blocks - 1].requires_grad_(False)
    return model


def states_bytes(model, dtype):
    """Bytes of all states of a model whose parameters are all trained, without padding, over all ranks."""
    return STATE_BYTES[dtype] * sum(param.numel() for param in model.parameters())


def named_budget(error):
    """The field and the number that a refusal names: 'device_bytes', 102400."""
    found = re.search(r"nearest plan that fits[^:]*: Plan\(.*?(\w+_bytes)=(\d+)\)", str(error))
    assert found, f"no plan that fits is named: {error}"
    return found[1], int(found[2])


def shard_near(model, **fields):
    """Shards with the budgets asked for; each one that is refused becomes the number that the refusal names."""
    for _ in range(4):
        try:
            unwall.shard(model, Plan(**fields))
            return fields
        except PlanError as error:
            refusal = error
        name, needed_bytes = named_budget(refusal)
        assert needed_bytes > fields[name], f"the named budget is no larger than the refused one: {refusal}"
        fields = {**fields, name: needed_bytes}
    raise AssertionError(f"four refusals, each with the budget that the one before named; the last one: {refusal}")


def smallest(model, name, **fields):
    """The smallest budget of one tier that a plan gets by with, as its refusal names it."""
    with pytest.raises(PlanError) as refusal:
        unwall.shard(model, Plan(**fields, **{name: 1}))
    field, needed_bytes = named_budget(refusal.value)
    assert field == name
    return needed_bytes


@contextlib.contextmanager
def few_chunks():
    """Two chunks under update instead of six. With six a host that has room for them holds all of these small models, too, and
    no budget puts groups on all tiers."""
    before = working.CHUNKS_IN_FLIGHT
    working.CHUNKS_IN_FLIGHT = resources.CHUNKS_IN_FLIGHT = 2
    try:
        yield
    finally:
        working.CHUNKS_IN_FLIGHT = resources.CHUNKS_IN_FLIGHT = before


def mixed_plan(setup, folder):
    """The fields of an ``auto`` plan whose budgets put groups on each of the three tiers. Inside ``few_chunks``."""
    fields = {"stage": setup.stage, "compute_dtype": setup.dtype, "passes": setup.passes, "disk": folder}
    like = setup.stage, setup.dtype, setup.passes, setup.frozen, setup.blocks, rank_and_world()[1], working.CHUNKS_IN_FLIGHT
    if like in _mixed_budgets:
        return {**fields, **_mixed_budgets[like]}
    model = build(setup.frozen, setup.blocks)
    least_device = smallest(model, "device_bytes", **fields)
    least_host = smallest(model, "host_bytes", device_bytes=least_device, **fields)
    states = smallest(model, "device_bytes", **{**fields, **DEVICE}) - least_device
    for share in range(56):  # parameters and gradients of groups on disk take room on the host before whole groups do
        budgets = {"device_bytes": least_device + states // 5, "host_bytes": least_host + share * states // 40}
        model = build(setup.frozen, setup.blocks)
        fitting = shard_near(model, **fields, **budgets)
        if homes(model) == {"device", "host", "disk"}:
            _mixed_budgets[like] = {name: fitting[name] for name in budgets}
            return fitting
    raise AssertionError(f"no budget puts groups on all tiers; the last one {fitting}: {homes(model)}")


_mixed_budgets = {}
"""What was found for the same setup: by every rank alike."""


def homes(model):
    """The tiers that the groups of a model have for their optimizer state."""
    return {group.home.states for group in unwall.api.engine(model).groups}


def start(setup, fields, folder):
    """A sharded model and its optimizer. ``fields``: of the plan."""
    model = build(setup.frozen, setup.blocks)
    unwall.shard(
        model, Plan(**{"stage": setup.stage, "compute_dtype": setup.dtype, "passes": setup.passes, "disk": folder, **fields})
    )
    options = {"max_grad_norm": setup.clip, "speculate": setup.speculate}
    return model, unwall.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1, **options)


def backward(model, optimizer, setup, seed, width=WIDTH):
    torch.manual_seed(seed)
    inputs, target = torch.randn(8, width), torch.randn(8, 8)
    loss = (model(inputs).float() - target).square().mean()
    (optimizer.scale(loss) if setup.dtype == torch.float16 else loss).backward()


def step(model, optimizer, setup, number, width=WIDTH):
    rank, _ = rank_and_world()
    for part in range(setup.passes):
        local = setup.no_sync and part < setup.passes - 1
        with unwall.no_sync(model) if local else contextlib.nullcontext():
            backward(model, optimizer, setup, 1000 * number + 10 * part + rank, width)
    optimizer.step()
    optimizer.zero_grad()


def outcome(model, optimizer):
    """Parameters and moments (on rank 0; nothing on the others), detached from the model."""
    states = optimizer.state_dict()["state"]
    moments = {f"state.{number}.{name}": value for number, entry in states.items() for name, value in entry.items()}
    return {name: torch.as_tensor(value).clone() for name, value in {**model.state_dict(), **moments}.items()}


def over_budget(model):
    """Tiers that held more than their budget at any time since the last reset."""
    tiers = unwall.stats(model).tiers.items()
    return [f"{name}: {tier}" for name, tier in tiers if tier.budget_bytes is not None and tier.peak_bytes > tier.budget_bytes]


def train(setup, fields, folder):
    """The outcome of a whole run, and the tiers its groups were at home on."""
    model, optimizer = start(setup, fields, folder)
    for number in range(setup.steps):
        step(model, optimizer, setup, number)
    assert over_budget(model) == []
    return outcome(model, optimizer), homes(model)


def differing(expected, got):
    """Names of what is not the same bit by bit."""
    if list(expected) != list(got):
        return sorted(set(expected) ^ set(got))
    return [name for name in expected if not same_bits(expected[name], got[name])]


def same_bits(first, second):
    return first.dtype == second.dtype and torch.equal(first, second)
