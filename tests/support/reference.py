"""The same training twice: plain PyTorch in one process, and unwall in every rank.

A ``Case`` says what is trained: how to build the model, draw a batch, and run one iteration. Both loops seed before each
iteration in the same way, so dropout and the like agree too.
"""

import copy
import ctypes
import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import psutil
import torch
import torch.nn.functional as F
from ranks import RankPool, rank_and_world
from torch import Tensor, nn

import unwall
from unwall.plans import Plan, PlanError

FP32 = Plan(stage=3, compute_dtype=torch.float32)
ON_DEVICE = {"params": "device", "grads": "device", "optimizer": "device"}

Optimizer = torch.optim.Optimizer
MakeOptimizer = Callable[[nn.Module], Optimizer]


def mse(model: nn.Module, batch: Any) -> Tensor:
    inputs, target = batch
    return F.mse_loss(model(inputs), target)


def plain_iteration(case: "Case", model: nn.Module, optimizer: Optimizer, batch: Any, step: int, rank: int) -> Tensor:
    loss = case.loss(model, batch)
    loss.backward()
    return loss.detach()


def vectors(rows: int = 8, width: int = 16) -> tuple[Tensor, Tensor]:
    return torch.randn(rows, width), torch.randn(rows, width)


@dataclass(frozen=True, kw_only=True)
class Case:
    """What is trained. Every field is a top-level function or class, so that it travels to the ranks by name."""

    build: Callable[[], nn.Module]
    batch: Callable[[], Any] = vectors
    loss: Callable[[nn.Module, Any], Tensor] = mse
    iterate: Callable[..., Tensor] = plain_iteration
    """One iteration up to, and without, ``optimizer.step()``; gives the loss."""


@dataclass
class Run:
    """What one rank (or, with plain PyTorch, rank 0 of the imagined ranks) saw."""

    losses: list[list[float]]
    """Per step, per rank (unwall: this rank alone)."""
    state: dict[str, Tensor]
    norms: list[float] = field(default_factory=list)
    states: list[dict[str, Tensor]] = field(default_factory=list)
    """Before the first step and after each, where asked for."""
    budget: int | None = None


def seeded(build: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return build()


def draw(case: Case, step: int, rank: int, world: int) -> Any:
    """The batch of this step and rank; leaves the generator as every implementation must find it before the forward."""
    torch.manual_seed(1000 + step * world + rank)
    return case.batch()


def adamw(model: nn.Module) -> Optimizer:
    # A gradient that is zero but for rounding (a key's bias in attention) is blown up to a full-size step by Adam. A large
    # eps keeps such noise small, so that parity can be asked of every parameter. test_parity.py runs with the default eps.
    return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3, weight_decay=0.1)


def unwall_adamw(model: nn.Module, max_grad_norm: float | None = None) -> Optimizer:
    return unwall.AdamW(model.parameters(), lr=1e-2, eps=1e-3, weight_decay=0.1, max_grad_norm=max_grad_norm)


def average_gradients(replicas: list[nn.Module]) -> None:
    """What DistributedDataParallel does: the mean over the ranks, where a rank without a gradient counts as zero."""
    for copies in zip(*(replica.parameters() for replica in replicas), strict=True):
        present = [parameter.grad for parameter in copies if parameter.grad is not None]
        if not present:
            continue
        mean = functools.reduce(torch.add, present) / len(replicas)
        for parameter in copies:
            parameter.grad = mean.clone()


@functools.cache
def train_plain(
    case: Case,
    *,
    world: int = 1,
    steps: int = 5,
    optimizer: MakeOptimizer = adamw,
    max_grad_norm: float | None = None,
    scheduler: Callable[[Optimizer], Any] | None = None,
) -> Run:
    """Plain PyTorch: a replica for each rank, gradients averaged, ``torch.optim``."""
    replicas = [seeded(case.build) for _ in range(world)]
    optimizers = [optimizer(replica) for replica in replicas]
    schedulers = [scheduler(one) for one in optimizers] if scheduler else []
    run = Run(losses=[], state={})
    for step in range(steps):
        losses = []
        for rank, (replica, one) in enumerate(zip(replicas, optimizers, strict=True)):
            batch = draw(case, step, rank, world)
            losses.append(float(case.iterate(case, replica, one, batch, step, rank)))
        run.losses.append(losses)
        average_gradients(replicas)
        if max_grad_norm is not None:
            norms = [nn.utils.clip_grad_norm_(replica.parameters(), max_grad_norm) for replica in replicas]
            run.norms.append(float(norms[0]))
        for one in optimizers:
            one.step()
            one.zero_grad()
        for one in schedulers:
            one.step()
    run.state = copy.deepcopy(replicas[0].state_dict())
    return run


def train_unwall(
    case: Case,
    plan: Plan = FP32,
    *,
    steps: int = 5,
    optimizer: MakeOptimizer = unwall_adamw,
    scheduler: Callable[[Optimizer], Any] | None = None,
    tight: bool = False,
    repeat_step: int = 1,
    record: bool = False,
) -> Run:
    """The same through unwall, in one rank. ``tight``: under the smallest device budget. ``record``: keep all states."""
    rank, world = rank_and_world()
    model = seeded(case.build)
    run = Run(losses=[], state={})
    if tight:
        run.budget = shard_tight(model, plan)
    else:
        unwall.shard(model, plan)
    one = optimizer(model)
    schedulers = [scheduler(one)] if scheduler else []
    if record:
        run.states.append(whole_state(model))
    for step in range(steps):
        batch = draw(case, step, rank, world)
        run.losses.append([float(case.iterate(case, model, one, batch, step, rank))])
        for _ in range(repeat_step):
            one.step()
        if getattr(one, "grad_norm", None) is not None:
            run.norms.append(float(one.grad_norm))
        one.zero_grad()
        for schedule in schedulers:
            schedule.step()
        if record:
            run.states.append(whole_state(model))
    run.state = whole_state(model)
    return run


def whole_state(model: nn.Module) -> dict[str, Tensor]:
    """``model.state_dict()`` as it is on rank 0 (a collective), detached from the model's memory."""
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def shard_tight(model: nn.Module, plan: Plan = FP32) -> int:
    """Shards under the smallest device budget (within 5%) that unwall accepts, so that groups must stream. Gives the budget.

    A refused plan leaves the model as it was, so the same model is tried again.
    """
    _, world = rank_and_world()
    fields = {name: getattr(plan, name) for name in ("stage", "compute_dtype", "reduce_dtype", "keep_fp32", "tiles")}
    shapes = [(name, param.shape, param.dtype, param.requires_grad) for name, param in model.named_parameters()]
    like = repr(model), tuple(shapes), world, tuple(fields.items())
    whole_bytes = sum(4 * parameter.numel() for parameter in model.parameters())
    budget, limit = _tight_budgets.get(like, whole_bytes // world + 1), 1000 * whole_bytes + (64 << 20)
    while budget < limit:
        try:
            unwall.shard(model, Plan(**fields, **ON_DEVICE, device_bytes=budget))
        except PlanError as refusal:  # it names a budget that was tried, and is close to the least
            budget = max(int(budget * 1.05) + 64, int(refusal.lack[1] * 0.9) if refusal.lack[0] == 0 else 0)
        else:
            _tight_budgets[like] = budget
            return budget
    raise AssertionError(f"no device budget up to {limit} bytes was accepted for {whole_bytes} bytes of parameters")


_tight_budgets: dict[tuple[Any, ...], int] = {}
"""What was found for models of the same shapes: by every rank alike, as all of them run the same functions."""


def resident_bytes() -> int:
    """What the process really holds: freed memory is given back to the system first, as the allocator would keep some."""
    ctypes.CDLL(None).malloc_trim(0)
    return psutil.Process().memory_info().rss


def assert_close(reference: Mapping[str, Tensor], got: Mapping[str, Tensor], rel: float = 1e-6) -> None:
    """Every tensor within ``rel`` of the reference, as the norm of the difference over the norm of the reference."""
    assert list(got) == list(reference), f"names differ: {sorted(set(got) ^ set(reference))}"
    wrong = []
    for name, expected in reference.items():
        value = got[name]
        if value.shape != expected.shape or value.dtype != expected.dtype:
            wrong.append(f"{name}: {value.dtype} {tuple(value.shape)}, expected {expected.dtype} {tuple(expected.shape)}")
            continue
        a, b = value.double(), expected.double()
        difference, size = float((a - b).norm()), float(b.norm())
        if not difference <= rel * size:
            wrong.append(
                f"{name}: |difference| / |reference| = {difference / size if size else difference:.2e}, limit {rel:.0e}"
            )
    assert not wrong, "\n".join(wrong)


def assert_equal(first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> None:
    """Bit by bit."""
    assert list(first) == list(second), f"names differ: {sorted(set(first) ^ set(second))}"
    wrong = [name for name in first if first[name].dtype != second[name].dtype or not torch.equal(first[name], second[name])]
    assert not wrong, f"not identical: {wrong}"


def assert_losses(reference: Iterable[Iterable[float]], got: list[Run], rel: float = 1e-6) -> None:
    """Each rank's loss at each step."""
    for step, expected in enumerate(reference):
        for rank, value in enumerate(expected):
            loss = got[rank].losses[step][0]
            assert abs(loss - value) <= rel * abs(value), f"step {step}, rank {rank}: loss {loss!r}, plain PyTorch {value!r}"


def check_parity(
    pool: RankPool, case: Case, plan: Plan = FP32, *, steps: int = 5, rel: float = 1e-6, tight: bool = False, **options: Any
) -> list[Run]:
    """Trains both ways and compares losses and parameters. Options with ``plain_`` before the name go to plain PyTorch."""
    plain = {name.removeprefix("plain_"): value for name, value in options.items() if name.startswith("plain_")}
    ours = {name: value for name, value in options.items() if not name.startswith("plain_")}
    expected = train_plain(case, world=pool.world_size, steps=steps, **plain)
    got = pool.run(train_unwall, case, plan, steps=steps, tight=tight, **ours)
    assert_losses(expected.losses, got, rel)
    assert_close(expected.state, got[0].state, rel)
    return got
