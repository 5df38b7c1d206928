"""One rank fails in the middle of training: it raises its own error, the others one that names it, and all go on together.

The loop is what a user would write: any of these errors means forget the gradients and run the batch again.
"""

import errno
import itertools

import pytest
import torch
from models import NestedNet
from ranks import rank_and_world
from reference import seeded, vectors

import unwall
from unwall.plans import Plan
from unwall.shards.control import PeerError
from unwall.tiers.ledger import BudgetError

STEPS = 5
WHEN = (1, 3)
"""The first steps negotiate, the later ones follow a script."""
TIERS = ("device", "host", "disk")


class Boom(ArithmeticError):
    """What the user's own code raises."""


OWN = (OSError, BudgetError, MemoryError, Boom, KeyboardInterrupt)


def sharded(tier, folder):
    places = {} if tier == "device" else {"params": tier, "optimizer": tier}
    if tier == "disk":
        places |= {"grads": "disk", "disk": folder, "disk_bytes": "64MiB", "host_bytes": "64MiB"}
    model = seeded(NestedNet)
    unwall.shard(model, Plan(compute_dtype=torch.float32, device_bytes="1MiB", **places))
    return model, unwall.AdamW(model.parameters(), lr=1e-2, speculate=False)


def raise_once(owner, name, error, position):
    """A method that raises when it is called for the n-th time from now."""
    real, calls = getattr(owner, name), itertools.count()

    def raising(*args, **kwargs):
        if next(calls) == position:
            raise error
        return real(*args, **kwargs)

    setattr(owner, name, raising)


class Fault:
    """Something that goes wrong once, in the next forward or backward of this rank."""

    def __init__(self, model, kind, phase):
        self.phase = phase
        engine = unwall.api.engine(model)
        in_forward = phase == "forward"
        match kind:
            case "disk":
                op, code = ("read", errno.EIO) if in_forward else ("write", errno.ENOSPC)
                engine.tiers.disk.engine.inject_fault(op, 1, 1, code)
            case "memory":
                raise_once(engine.tiers.device, "inflate" if in_forward else "allocate", MemoryError("told to"), 1)
            case "budget":
                raise_once(engine.executor, "make_room", BudgetError("device", 1, 2, 3, "a test"), 1)
            case _:
                self.error = KeyboardInterrupt("told to") if kind == "interrupt" else Boom("told to")
                middle = [module for module in model.modules() if list(module.parameters(recurse=False))][2]
                self.handle = middle.register_forward_hook(self)

    def __call__(self, module, args, output):
        self.handle.remove()
        if self.phase == "forward":
            raise self.error
        output.register_hook(self.stop)

    def stop(self, _):
        raise self.error


def forward(model, number):
    torch.manual_seed(number)
    inputs, target = vectors()
    return (model(inputs) - target).square().mean()


def train(tier, folder, kind=None, phase="forward", when=0, bad=1):
    """The whole model after training (rank 0), and what this rank was told on the way."""
    model, optimizer = sharded(tier, folder)
    told = []
    for number in range(STEPS):
        strikes = kind is not None and (number, rank_and_world()[0]) == (when, bad)
        early = phase == "forward" or kind in ("user", "interrupt")  # it is put into the forward
        for _ in range(4):
            try:
                if strikes and early:
                    strikes = Fault(model, kind, phase) is None
                loss = forward(model, number)
                if strikes and phase == "backward":
                    strikes = Fault(model, kind, phase) is None
                loss.backward()
                if strikes:
                    strikes = Fault(model, kind, phase) is None
                optimizer.step()
                break
            except (PeerError, *OWN) as error:
                told.append((type(error).__name__, str(error)))
                optimizer.zero_grad()
        else:
            raise AssertionError(f"step {number} failed again and again: {told}")
    return model.state_dict(), told


def same(expected, got):
    return expected.keys() == got.keys() and all(torch.equal(value, got[name]) for name, value in expected.items())


CASES = [
    ("disk", "disk"),
    ("disk", "memory"),
    ("host", "budget"),
    ("device", "memory"),
    ("device", "user"),
    ("host", "interrupt"),
]


@pytest.mark.parametrize("phase", ["forward", "backward"])
@pytest.mark.parametrize(("tier", "kind"), CASES)
def test_all_ranks_go_on_after_a_fault_of_one(ranks, tier, kind, phase, tmp_path):
    expected = ranks(2).run(train, tier, str(tmp_path))[0][0]
    for when in WHEN:
        (got, told), (_, own) = ranks(2).run(train, tier, str(tmp_path), kind, phase, when, limit_s=60)
        assert same(expected, got), (when, told, own)
        assert [name for name, _ in own] != [], "the fault did not strike"
        assert [name for name, _ in told] == ["PeerError"], told
        assert "rank 1 failed" in told[0][1]


def test_all_ranks_go_on_after_an_update_that_failed_on_one(ranks, tmp_path):
    expected = ranks(2).run(train, "disk", str(tmp_path))[0][0]
    (got, told), (_, own) = ranks(2).run(train, "disk", str(tmp_path), "disk", "step", 2, limit_s=60)
    assert same(expected, got), (told, own)
    assert [name for name, _ in told] == ["PeerError"], (told, own)
