"""Disk faults and Ctrl-C in what a loop does beside its steps: averages, moves, exports, saves, generation, activations on disk,
tiles, the loss without logits. The error comes out, the call is made again, and all is as in an undisturbed run."""

import errno
import gc
import random
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from interrupting import AtEvent
from ranks import rank_and_world
from safetensors.torch import load_file
from torch import nn

import unwall
from unwall.nn import linear_cross_entropy
from unwall.runtime import saved_on_host

FAULTS = {"read": errno.EIO, "write": errno.ENOSPC}
DISK = {"params": "disk", "grads": "disk", "optimizer": "disk"}
HOST = {"params": "host", "grads": "host", "optimizer": "host"}
WIDTH, WORDS = 32, 40


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


class Net(nn.Module):
    def __init__(self, fused=False):
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.fused = fused

    def forward(self, ids, labels=None):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        if self.fused and labels is not None:
            return linear_cross_entropy(x, self.head.weight, labels)
        logits = self.head(x)
        return logits if labels is None else nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


class Life:
    """A model on disk, and what is done with it, act by act. ``seen``: what the user got."""

    def __init__(self, folder, fused=False, **fields):
        torch.manual_seed(0)
        self.folder, self.seen = folder, {}
        self.plan = unwall.Plan(compute_dtype=torch.float32, disk=str(folder), **{**DISK, **fields})
        self.model = unwall.shard(Net(fused), self.plan)
        self.optimizer = unwall.AdamW(self.model.parameters(), lr=1e-2, speculate=False)
        self.average = None

    def step(self, number):
        ids = torch.randint(0, WORDS, (2, 5), generator=torch.Generator().manual_seed(number))
        before = None

        def act():
            nonlocal before
            taken = unwall.stats(self.model).steps  # waits for updates, and says what they failed with
            before = taken if before is None else before
            if taken == before:
                self.optimizer.zero_grad()
                self.model(ids, ids).backward()
                self.optimizer.step()
            self.optimizer.zero_grad()

        return act

    def begin_average(self):
        self.average = unwall.ema(self.model, 0.8)

    def update(self):
        count = self.average.updates

        def act():
            if self.average.updates == count:
                self.average.update()

        return act

    def look(self, name):
        def act():
            with torch.no_grad():
                self.seen[name] = self.model(torch.arange(6)[None]).clone()

        return act

    def swapped(self):
        with self.average.swap(), torch.no_grad():
            self.seen["swapped"] = self.model(torch.arange(6)[None]).clone()

    def averages(self):
        self.seen["averages"] = self.average.state_dict()["params"]

    def move(self, **fields):
        return lambda: unwall.move(self.model, replace(self.plan, **fields))

    def export(self):
        unwall.export_weights(self.model, self.folder / "out")
        self.seen["exported"] = load_file(self.folder / "out" / "model.safetensors")

    def save(self):
        unwall.save(self.folder / "saved", self.model, self.optimizer, block=False).wait()

    def load(self):
        unwall.load(self.folder / "saved", self.model, self.optimizer)

    def outcome(self):
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()["state"], **self.seen}


def averaged(life):
    yield life.begin_average
    yield life.step(0)
    yield life.update()
    yield life.step(1)
    yield life.update()
    yield life.swapped
    yield life.look("after")
    yield life.averages
    yield life.step(2)


def moved(life):
    yield life.step(0)
    yield life.move(**HOST)
    yield life.step(1)
    yield life.move(**DISK)
    yield life.step(2)


def exported(life):
    yield life.step(0)
    yield life.export
    yield life.step(1)


def saved(life):
    yield life.step(0)
    yield life.save
    yield life.step(1)
    yield life.load
    yield life.step(2)


def trained(life):
    yield life.step(0)
    yield life.look("between")
    yield life.step(1)


LIVES = {
    "averages": (averaged, {}),
    "moves": (moved, {}),
    "exports": (exported, {}),
    "saves": (saved, {}),
    "activations": (trained, {**HOST, "activations": "disk"}),
    "tiles": (trained, {"tiles": 4}),
    "loss": (trained, {"fused": True}),
    "tiled-loss": (trained, {"fused": True, "tiles": 4}),
}


def live(name, folder, disturb=None, kinds=(OSError,), around=None):
    """Does it all, each act again when it failed. What came out, and what the errors said: the errors themselves would keep what
    they met."""
    gc.collect()  # not in an act, where an interrupt could come while what earlier lives have left is finalised
    script, fields = LIVES[name]
    life, errors = Life(folder, **fields), []
    if disturb is not None:
        disturb(life)
    for act in script(life):
        insist(act if around is None else around(act), errors, kinds)
    return life, insist(life.outcome, errors, kinds), errors


def insist(act, errors, kinds, times=6):
    for _ in range(times):
        try:
            return act()
        except kinds as error:
            errors.append((getattr(error, "errno", None), repr(error)))
    raise AssertionError(f"failed {times} times: {errors}")


def balance(life):
    engine = unwall.api.engine(life.model)
    engine.finish()
    for index in range(len(engine.groups)):
        engine.executor.invalidate(index)
    for ledger in engine.tiers.ledgers.values():
        ledger.reclaim()  # what is kept to be used again
    return {tier: ledger.live_bytes for tier, ledger in engine.tiers.ledgers.items()}


def equal(one, other):
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, tuple):
        return len(one) == len(other) and all(map(equal, one, other))
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


def folders(base):
    for number in range(10_000):
        folder = base / str(number)
        folder.mkdir()
        yield folder


@pytest.fixture(autouse=True)
def everything_is_moved(monkeypatch):
    monkeypatch.setattr(saved_on_host, "MIN_BYTES", 1)


def faults(name, op, base, every):
    """A fault at every so many blocks that a run moves. What went wrong."""
    fresh = folders(base)
    calm, expected, _ = live(name, next(fresh))
    accounts, wrong, hits = balance(calm), [], 0
    quiet = name == "activations"  # they stay on the host after a fault, with a warning
    for position in range(0, 10_000, every) if not quiet else (0, 1, 2, 3):

        def disturb(life, position=position):
            unwall.api.engine(life.model).tiers.disk.engine.inject_fault(op, position, 1, FAULTS[op])

        life, got, errors = live(name, next(fresh), disturb)
        if not errors and not quiet:
            break
        hits += 1
        wrong += [] if equal(expected, got) else [f"{op} {position}: other values after {errors[-1:]}"]
        found = balance(life)
        wrong += [] if found == accounts else [f"{op} {position}: {found} instead of {accounts} after {errors[-1:]}"]
        wrong += [f"{op} {position}: {text}" for number, text in errors if number != FAULTS[op]]
    assert hits > 1
    return wrong


def interrupts(name, base, count, seed):
    """Ctrl-C at random places of each act."""
    fresh, rng = folders(base), random.Random(seed)
    counted = []

    def counting(act):
        def run():
            with AtEvent() as seen:
                result = act()
            counted.append(seen.events)
            return result

        return run

    calm, expected, _ = live(name, next(fresh), around=counting)
    accounts, wrong, hits = balance(calm), [], 0
    sizes = list(counted)
    while hits < count:
        chosen, left_acts = rng.randrange(len(sizes)), iter(enumerate(sizes))

        def once(act, chosen=chosen, left_acts=left_acts):
            place, size = next(left_acts)
            left = [True]

            def run():
                if place != chosen or not left:
                    return act()
                left.clear()
                with AtEvent(rng.randrange(1, size)):
                    return act()

            return run

        life, got, errors = live(name, next(fresh), kinds=(KeyboardInterrupt,), around=once)
        hits += 1
        wrong += [] if equal(expected, got) else [f"interrupt {hits} in act {chosen}: other values, {errors}"]
        found = balance(life)
        wrong += [] if found == accounts else [f"interrupt {hits} in act {chosen}: {found} instead of {accounts}"]
    return wrong


@pytest.mark.filterwarnings("ignore:activations stay in host memory")
@pytest.mark.parametrize("op", FAULTS)
@pytest.mark.parametrize("name", LIVES)
def test_disk_faults(name, op, tmp_path):
    assert faults(name, op, tmp_path, 53 if "tile" in name else 23) == []


@pytest.mark.drill
@pytest.mark.parametrize("op", FAULTS)
@pytest.mark.parametrize("name", [name for name in LIVES if name != "activations"])
def test_disk_faults_at_many_blocks(name, op, tmp_path):
    assert faults(name, op, tmp_path, 9 if "tile" in name else 3) == []


@pytest.mark.drill
@pytest.mark.parametrize("name", LIVES)
def test_interrupts(name, tmp_path):
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        assert interrupts(name, tmp_path, 12, 5) == []
    finally:
        signal.signal(signal.SIGINT, before)


def of_one_rank(name, folder, op, position):
    """The same over ranks, of which one has a fault: all raise, and all call again."""

    def disturb(life):
        if position is not None and rank_and_world()[0] == 1:
            unwall.api.engine(life.model).tiers.disk.engine.inject_fault(op, position, 1, FAULTS[op])

    life, got, errors = live(name, Path(folder), disturb, (OSError, RuntimeError))
    return got, balance(life), [text for _, text in errors]


@pytest.mark.drill
@pytest.mark.parametrize("op", FAULTS)
@pytest.mark.parametrize("name", ["moves", "exports", "saves", "loss"])
def test_disk_faults_of_one_of_three_ranks(name, op, ranks, tmp_path):
    fresh = folders(tmp_path)
    calm = ranks(3).run(of_one_rank, name, str(next(fresh)), op, None)
    for position in (0, 14, 29, 43):
        found = ranks(3).run(of_one_rank, name, str(next(fresh)), op, position)
        told = [errors for _, _, errors in found]
        assert all(equal(one[:2], other[:2]) for one, other in zip(calm, found, strict=True)), told
        assert not any("DivergedError" in text for errors in told for text in errors), told
        assert [bool(errors) for errors in told] in ([True] * 3, [False] * 3), told
