"""1,000 interrupts at random places of training, over all placements, on one rank and on two: nothing crashes, hangs or leaks,
and the values are those of the steps that were taken."""

import gc
import random
import signal
import tempfile

import pytest
import torch
from interrupting import AtEvent, InHook
from ranks import rank_and_world
from torch import nn

import unwall
from unwall.plans import Plan

WIDTH, LAYERS = 16, 4
GROUP_BYTES = 4 * (WIDTH * WIDTH + WIDTH + 64) + 8192
ADAMW, CLIPPED, WRAPPED = "adamw", "clipped", "wrap"
PLACES = {
    "device": {"params": "device", "optimizer": "device"},
    "host": {"params": "host", "optimizer": "host"},
    "tight": {"params": "host", "optimizer": "host", "device_bytes": 8 * GROUP_BYTES},
    "disk": {"params": "disk", "optimizer": "disk"},
    "spill": {"params": "host", "optimizer": "disk", "device_bytes": 8 * GROUP_BYTES},
    "mixed": {"device_bytes": 14 * GROUP_BYTES, "host_bytes": "8MiB"},
}
ONE_RANK = [
    ("device", torch.float32, ADAMW),
    ("host", torch.float32, ADAMW),
    ("host", torch.bfloat16, ADAMW),
    ("tight", torch.bfloat16, ADAMW),
    ("tight", torch.float32, WRAPPED),
    ("disk", torch.float32, ADAMW),
    ("disk", torch.bfloat16, CLIPPED),
    ("spill", torch.bfloat16, ADAMW),
    ("spill", torch.float32, WRAPPED),
    ("mixed", torch.bfloat16, ADAMW),
]
TWO_RANKS = [("device", torch.float32, ADAMW), ("tight", torch.bfloat16, ADAMW), ("disk", torch.float32, CLIPPED)]
PER_CASE, PER_CASE_OF_TWO, PER_CASE_OF_ALARMS = 82, 60, 50
assert len(ONE_RANK) * PER_CASE + len(TWO_RANKS) * PER_CASE_OF_TWO == 1000


def start(place, dtype, kind, folder):
    torch.manual_seed(0)
    model = nn.Sequential(*[layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())])
    unwall.shard(model, Plan(compute_dtype=dtype, disk=folder, **PLACES[place]))
    if kind == WRAPPED:
        return model, unwall.wrap(torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9))
    return model, unwall.AdamW(model.parameters(), lr=1e-2, max_grad_norm=0.5 if kind == CLIPPED else None)


def iterate(model, optimizer, seed):
    rank, _ = rank_and_world()
    inputs = torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(100 * seed + rank))
    model(inputs).float().square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def balance(model, optimizer):
    """The accounts when everything is dropped that can be."""
    engine = unwall.api.engine(model)
    optimizer.zero_grad()
    engine.finish()
    for index in range(len(engine.groups)):
        engine.executor.invalidate(index)
    early = getattr(optimizer, "_early", None)
    if early is not None:
        early.reclaim()
    return {tier: ledger.live_bytes for tier, ledger in engine.tiers.ledgers.items()}


def values(model, optimizer):
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict()["state"]}


def equal(one, other):
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


def drill(place, dtype, kind, count, seed, inject, size):
    """``inject(rng, size)`` makes the interrupt; ``size()`` measures how many places there are. Trains until ``count`` interrupts
    have been raised."""
    before = {number: signal.signal(number, signal.default_int_handler) for number in (signal.SIGINT, signal.SIGALRM)}
    try:
        _drill(place, dtype, kind, count, seed, inject, size)
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)


def _drill(place, dtype, kind, count, seed, inject, size):
    gc.collect()  # not in a step, where an interrupt could come while what other tests have left is finalised
    with tempfile.TemporaryDirectory() as folder:
        model, optimizer = start(place, dtype, kind, folder)
        taken, raised, rng = [], 0, random.Random(seed)
        sizes = []
        for step in range(6):
            with size() as counted:
                iterate(model, optimizer, step)
            taken.append(step)
            sizes.append(counted.events)
        events = min(sizes)  # the first ones set things up, and in any of them what earlier tests have left may be collected
        # Some are beyond the last event, as how many there are depends on the other threads. Those in a finaliser may be lost.
        for step in range(6, 6 + 4 * count):
            if raised == count:
                break
            before = unwall.stats(model).steps
            try:
                with inject(rng, events):
                    iterate(model, optimizer, step)
            except KeyboardInterrupt:
                raised += 1
                if unwall.stats(model).steps == before:
                    optimizer.zero_grad()
            if unwall.stats(model).steps > before:
                taken.append(step)
            if step % 8 == 0:
                iterate(model, optimizer, 1000 + step)
                taken.append(1000 + step)
        optimizer.zero_grad()
        calm, calm_optimizer = start(place, dtype, kind, folder)
        for step in taken:
            iterate(calm, calm_optimizer, step)
        assert equal(values(model, optimizer), values(calm, calm_optimizer))
        assert balance(model, optimizer) == balance(calm, calm_optimizer)
        assert raised == count, f"{raised} interrupts in {4 * count} steps"


def at_event(rng, size):
    return AtEvent(rng.randrange(1, size))


def alarm_at_event(rng, size):
    """A handler of the user that raises: a time-out."""
    return AtEvent(rng.randrange(1, size), signal.SIGALRM)


def in_hook(rng, size):
    rank, _ = rank_and_world()
    hook, later = rng.randrange(1, size), [rng.randrange(200) for _ in range(2)]
    return InHook(hook, later[rank])


@pytest.mark.drill
@pytest.mark.parametrize(("place", "dtype", "kind"), ONE_RANK)
def test_interrupts_anywhere(place, dtype, kind):
    drill(place, dtype, kind, PER_CASE, 1, at_event, AtEvent)


@pytest.mark.drill
@pytest.mark.parametrize(("place", "dtype", "kind"), TWO_RANKS)
def test_interrupts_of_two_ranks(place, dtype, kind, ranks):
    ranks(2).run(drill, place, dtype, kind, PER_CASE_OF_TWO, 2, in_hook, InHook)


@pytest.mark.drill
@pytest.mark.parametrize(("place", "dtype", "kind"), [ONE_RANK[0], ONE_RANK[3], ONE_RANK[6], ONE_RANK[8]])
def test_alarms_anywhere(place, dtype, kind):
    drill(place, dtype, kind, PER_CASE_OF_ALARMS, 4, alarm_at_event, AtEvent)


@pytest.mark.parametrize("inject", [at_event, alarm_at_event])
def test_a_few_interrupts(inject):
    drill("tight", torch.bfloat16, ADAMW, 12, 3, inject, AtEvent)
