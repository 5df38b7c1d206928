"""How often ranks exchange words to agree: at most twice per pass once the loop is known, however many collectives there are."""

import contextlib

import pytest
import torch
from offload import shard_near
from ranks import rank_and_world
from reference import ON_DEVICE, seeded, shard_tight, unwall_adamw
from torch import nn

import unwall
from unwall.plans import Plan
from unwall.schedule.script import Book

WIDTH, LAYERS = 64, 8
LEARNING, STEADY = 6, 4
"""Iterations before counting, and counted ones."""


class Stack(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def one_pass(model):
    model(torch.randn(2, WIDTH)).square().mean().backward()


def train(model, optimizer):
    one_pass(model)
    optimizer.step()
    return 1


def train_clipped_by_hand(model, optimizer):
    one_pass(model)
    optimizer.clip_grad_norm_(1e-3)
    optimizer.step()
    return 1


def add_up(model, optimizer):
    for _ in range(3):
        one_pass(model)
    optimizer.step()
    return 3


def add_up_locally(model, optimizer):
    for last in (False, False, True):
        with contextlib.nullcontext() if last else unwall.no_sync(model):
            one_pass(model)
    optimizer.step()
    return 3


def evaluate(model, optimizer):
    with torch.no_grad():
        model(torch.randn(2, WIDTH))
    return 1


def train_and_evaluate(model, optimizer):
    return evaluate(model, optimizer) + train(model, optimizer) + evaluate(model, optimizer)


def two_forwards(model, optimizer):
    losses = [model(torch.randn(2, WIDTH)).square().mean() for _ in range(2)]
    for loss in losses:
        loss.backward()
    optimizer.step()
    return 2


def count(iterate, plan, max_grad_norm=None, negotiate=False):
    """Exchanges and passes of the counted iterations, and the collectives that moved something."""
    if negotiate:
        Book.expected, expected = (lambda *_: None), Book.expected
    try:
        torch.manual_seed(rank_and_world()[0])
        model = seeded(Stack)
        if plan == "tight":
            shard_tight(model)
        elif "host_bytes" in plan:
            shard_near(model, compute_dtype=torch.float32, **plan)
        else:
            unwall.shard(model, Plan(compute_dtype=torch.float32, **plan))
        optimizer = unwall_adamw(model, max_grad_norm)
        passes = 0
        for iteration in range(LEARNING + STEADY):
            if iteration == LEARNING:
                unwall.stats(model).reset()
                passes = 0
            passes += iterate(model, optimizer)
        stats = unwall.stats(model)
    finally:
        if negotiate:
            Book.expected = expected
    return stats.control_exchanges, passes, stats.collectives


HOST = {"params": "host", "optimizer": "host"}
STREAMED = {**HOST, "device_bytes": 60_000, "host_bytes": 10_000_000}


def check(pool, iterate, plan, **options):
    for exchanges, passes, collectives in pool.run(count, iterate, plan, **options):
        assert exchanges <= 2 * passes
        moved = collectives["all_gather"].elements + collectives["reduce_scatter"].elements
        assert moved > 0 or iterate is evaluate


@pytest.mark.parametrize("world", [2, 4, pytest.param(8, marks=pytest.mark.drill)])
@pytest.mark.parametrize("iterate", [train, add_up_locally, evaluate])
def test_at_most_two_exchanges_per_pass(ranks, world, iterate):
    check(ranks(world), iterate, {"stage": 3, **ON_DEVICE})


@pytest.mark.parametrize(
    "plan",
    [{"stage": 0}, {"stage": 1}, {"stage": 2}, "tight", HOST, STREAMED],
    ids=["stage 0", "stage 1", "stage 2", "smallest budget", "host", "host, streamed"],
)
@pytest.mark.parametrize("iterate", [train, add_up, train_and_evaluate])
def test_wherever_the_states_are(ranks, iterate, plan):
    check(ranks(2), iterate, plan)


@pytest.mark.parametrize("plan", [{"stage": 1}, {"stage": 2}, HOST], ids=["stage 1", "stage 2", "host"])
def test_without_sync(ranks, plan):
    check(ranks(2), add_up_locally, plan)


@pytest.mark.parametrize("iterate", [two_forwards, train_clipped_by_hand])
def test_in_other_loops(ranks, iterate):
    check(ranks(2), iterate, {"stage": 3, **ON_DEVICE})


def test_with_clipping(ranks):
    check(ranks(2), train, {"stage": 3, **ON_DEVICE}, max_grad_norm=1e-3)


def test_without_a_script_there_are_several_for_each_group(ranks):
    """Guards the tests above: the same collectives, negotiated one by one."""
    for exchanges, passes, _ in ranks(2).run(count, train, {"stage": 3, **ON_DEVICE}, negotiate=True):
        assert exchanges >= 3 * LAYERS * passes


def test_a_rank_alone_exchanges_nothing():
    exchanges, _, _ = count(train, {"stage": 3})
    assert exchanges == 0
