"""A small model on any tier, and things that go wrong on one rank while all of them train it."""

import errno
import itertools
import os
import signal
import subprocess

import torch
from ranks import rank_and_world
from reference import seeded, vectors
from torch import nn

import unwall
from unwall.plans import Plan
from unwall.shards.control import PeerError
from unwall.tiers.ledger import BudgetError

STEPS = 5
TIERS = ("device", "host", "disk")
WIDTH = 64


class Net(nn.Sequential):
    """Several groups, of each of which every rank has a part."""

    def __init__(self):
        super().__init__(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(6)))


class Boom(ArithmeticError):
    """What the user's own code raises."""


OWN = (OSError, BudgetError, MemoryError, Boom, KeyboardInterrupt)


def sharded(tier, folder):
    places = {} if tier == "device" else {"params": tier, "optimizer": tier}
    if tier == "disk":
        places |= {"grads": "disk", "disk": folder, "disk_bytes": "64MiB", "host_bytes": "64MiB"}
    model = seeded(Net)
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
    torch.manual_seed(10 * number + rank_and_world()[0])
    device = next(model.parameters()).device
    inputs, target = (tensor.to(device) for tensor in vectors(width=WIDTH))
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


def insist(call, told, times=4):
    """Calls until it works."""
    for _ in range(times):
        try:
            return call()
        except (PeerError, *OWN) as error:
            told.append((type(error).__name__, str(error)))
    raise AssertionError(f"failed again and again: {told}")


def look(tier, folder, what, kind=None, bad=1):
    """Like ``train``, where the fault strikes outside of training: in ``what``."""
    model, optimizer = sharded(tier, folder)
    rank, told = rank_and_world()[0], []
    for number in range(3):
        forward(model, number).backward()
        optimizer.step()
        optimizer.zero_grad()
    struck = kind is None or rank != bad
    values = {name: value + 1 for name, value in everywhere(model).items()}
    forward(model, 6).backward()
    optimizer.step()
    unwall.api.engine(model).finish()  # nothing is in memory any more, and nothing under way
    engine = unwall.api.engine(model)

    def once():
        nonlocal struck
        strikes, struck = not struck, True
        if strikes and kind == "disk":
            engine.tiers.disk.engine.inject_fault("write" if what == "load_state_dict" else "read", 0, 1, errno.EIO)
        match what:
            case "evaluation":
                with torch.no_grad():
                    forward(model, 7)
            case "state_dict":
                model.state_dict()
            case "state_dict of the optimizer":
                optimizer.state_dict()
            case "load_state_dict":
                model.load_state_dict(values, strict=False)
                with torch.no_grad():  # where a rank that loaded well is told
                    forward(model, 7)
            case "full_params":
                with unwall.full_params(model, write=True):
                    if strikes and kind == "user":
                        raise Boom("told to")
                    for param in model.parameters():
                        param.data.mul_(0.5)

    insist(once, told)
    forward(model, 8).backward()
    optimizer.step()
    return model.state_dict(), told


def everywhere(model):
    """The whole model on every rank."""
    with unwall.full_params(model):
        return {name: param.detach().clone() for name, param in model.named_parameters()}


class Strike:
    """``act``s once, in the middle of a forward or of its backward."""

    def __init__(self, module, act):
        self.module, self.act = module, act

    def arm(self, in_backward=False):
        self.in_backward = in_backward
        self.handle = self.module.register_forward_hook(self)

    def __call__(self, module, args, output):
        self.handle.remove()
        if self.in_backward:
            output.register_hook(lambda _: self.act())
        else:
            self.act()


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def pause(seconds=2):
    """Stopped, and let go on by another process, which waits for the stop first."""
    mine = f"/proc/{os.getpid()}/status"
    seen = f"while [ -e {mine} ] && ! grep -q '^State:.T' {mine}; do sleep 0.05; done"
    subprocess.Popen(["sh", "-c", f"{seen}; sleep {seconds}; kill -CONT {os.getpid()}"])
    os.kill(os.getpid(), signal.SIGSTOP)


def disturb(tier, folder, phase, act, bad=1):
    """Trains, evaluates, saves and loads. In one of these phases one rank ``act``s strangely. The whole model (rank 0)."""
    model, optimizer = sharded(tier, folder)
    engine, rank = unwall.api.engine(model), rank_and_world()[0]
    middle = [module for module in model.modules() if list(module.parameters(recurse=False))][2]
    for number in range(STEPS):
        strange = phase if (rank, number) == (bad, 3) else None
        strike = Strike(middle, act)
        if strange in ("forward", "backward"):
            strike.arm(in_backward=strange == "backward")
        forward(model, number).backward()
        if strange == "step":
            settle = engine.settle

            def in_step(settle=settle):
                engine.settle = settle
                act()
                settle()

            engine.settle = in_step
        optimizer.step()
        optimizer.zero_grad()
        if strange == "evaluation":
            strike.arm()
        with torch.no_grad():
            forward(model, number)
        if strange == "state_dict":
            act()
        model.state_dict()
        values = everywhere(model)
        if strange == "load_state_dict":
            act()
        model.load_state_dict(values, strict=False)
    return model.state_dict()


def die_in(tier, folder, phase, bad=1):
    return disturb(tier, folder, phase, die, bad)


def pause_in(tier, folder, phase, bad=1):
    return disturb(tier, folder, phase, pause, bad)


def nothing():
    """Acts as all others."""


def undisturbed(tier, folder):
    return disturb(tier, folder, None, nothing)
