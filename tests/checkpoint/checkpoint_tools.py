"""Training runs for the tests of checkpoints. What they give is compared bit by bit."""

import random

import numpy as np
import torch
from offload import DEVICE, DISK, HOST, Setup, differing, outcome, start, step
from ranks import rank_and_world

import unwall
from unwall.plans import Plan

TIERS = {"device": DEVICE, "host": HOST, "disk": DISK, "mixed": {"params": "host", "optimizer": "disk"}}


def run(folder, tiers, first, last, *, load=None, save=None, optimizer=None, **setup):
    """Steps ``first`` to ``last`` of a training, from a checkpoint and into one. Gives (on rank 0) all values."""
    setup = Setup(**{"blocks": 4, "frozen": True, **setup})
    model, trained = begin(setup, TIERS[tiers], folder, optimizer)
    extra = None if load is None else unwall.load(load, model, trained)
    for number in range(first, last):
        step(model, trained, setup, number)
    if save is not None:
        unwall.save(save, model, trained, extra={"step": last})
    return everything(model, trained), extra


def begin(setup, fields, folder, optimizer=None):
    model, trained = start(setup, fields, folder)
    if optimizer is not None:
        del trained
        trained = unwall.wrap(optimizer(model))
    return model, trained


def everything(model, optimizer):
    """Parameters, states and options."""
    options = {
        f"option.{number}.{name}": torch.as_tensor(value if value is not None else -1.0)
        for number, group in enumerate(optimizer.param_groups)
        for name, value in group.items()
        if name not in ("params", "param_names") and not isinstance(value, str | bool | tuple)
    }
    found = _outcome(model, optimizer)
    return {**found, **options} if rank_and_world()[0] == 0 else {}


def _outcome(model, optimizer):
    states = optimizer.state_dict()["state"]
    flat = {}
    for number, entry in states.items():
        for name, value in {**entry, **entry.get("inner", {})}.items():
            if name != "inner":
                flat[f"state.{number}.{name}"] = torch.as_tensor(value).clone()
    return {**{name: value.clone() for name, value in model.state_dict().items()}, **flat}


def momentum(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def amsgrad(model):
    return torch.optim.Adam(model.parameters(), lr=1e-2, amsgrad=True)


def draw():
    """From every generator."""
    return torch.rand(()).item(), random.random(), float(np.random.rand())


__all__ = ["Plan", "Setup", "amsgrad", "begin", "differing", "draw", "everything", "momentum", "outcome", "run", "step"]
