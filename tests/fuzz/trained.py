"""``unwall train``, stopped and started again, under budgets: ``python -m fuzz.trained --first 0 --count 20``.

Drawn: adapters, lean states, passes, clipping, a schedule, evaluation, a disk; budgets of the smallest size that a refusal names;
after which step the run is stopped as SIGTERM stops it; and whether budgets are left out when it goes on.

What must hold: losses and weights are those of the run that was not stopped, and no tier ever holds more than its budget.
"""

import contextlib
import dataclasses
import io
import random
import re
from pathlib import Path
from unittest import mock

import safetensors.torch
from offload import differing, over_budget
from train_tools import losses, make_jsonl, make_model, train_here

from fuzz.command import Log, Refused, main
from fuzz.keeping import REFUSALS
from unwall.plans import PlanError
from unwall.train import command
from unwall.train.errors import TrainError
from unwall.train.loop import Loop

STEPS = 8
NAMED = (
    re.compile(r"--(device-bytes|host-bytes)[= ]+([\d.]+ ?[KMG]iB|\d+)"),
    re.compile(r"(device_bytes|host_bytes|disk_bytes)[= ]+'?\"?([\d.]+ ?[KMG]?i?B?)"),
)
"""How a refusal names a budget: as an option, or else as a field."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    options: tuple[tuple[str, object], ...]
    needs_disk: bool
    evaluates: bool
    tight: tuple[str, ...]
    """The budgets that are as small as they can be."""
    stops_after: int
    frees: bool
    """Without these budgets after the stop."""


def draw(seed):
    rng = random.Random(f"{seed}-trained")
    options = {"seq": 48, "batch": 4, "lr": 1e-2, "schedule": rng.choice(("constant", "linear")), "warmup": 0, "save_every": 3}
    if rng.random() < 0.4:
        options |= {"lora": True, "lora_dropout": rng.choice((0.0, 0.1))}
    if rng.random() < 0.4:
        options["states"] = "lean"
    if rng.random() < 0.4:
        options["accumulate"] = rng.choice((2, 4))
    options["clip"] = rng.choice((1.0, 0.0, 0.01))
    return Case(
        options=tuple(options.items()),
        needs_disk=rng.random() < 0.5,
        evaluates=rng.random() < 0.3,
        tight=rng.choice(((), ("device_bytes",), ("device_bytes", "host_bytes"), ("host_bytes",))),
        stops_after=rng.randint(1, STEPS - 1),
        frees=rng.random() < 0.4,
    )


def run(**options):
    """``unwall train`` in this process: which tiers held more than their budgets."""
    made = []

    def kept(*args, **kwargs):
        made.append(make(*args, **kwargs))
        return made[-1]

    make = command.make_model
    with mock.patch.object(command, "make_model", kept), contextlib.redirect_stdout(io.StringIO()):
        train_here(**options)
    return over_budget(made[-1].base) if made else []


@contextlib.contextmanager
def stopped_after(steps):
    """As if SIGTERM came in a step."""
    agree = Loop._agree

    def asked(self):
        batch, counts, signal = agree(self)
        return batch, counts, "SIGTERM" if self.progress.step >= steps else signal

    with mock.patch.object(Loop, "_agree", asked):
        yield


def smallest_budgets(case, options, folder, log):
    """Each raised to what the refusal names, until a run of one step is accepted."""
    budgets = dict.fromkeys(case.tight, "1KiB")
    for number in range(REFUSALS):
        try:
            run(**options | budgets, out=folder / f"probe-{number}", steps=1)
        except (PlanError, TrainError) as refusal:
            log(refusal)
            named = next(filter(None, (pattern.search(str(refusal)) for pattern in NAMED)), None)
            if named is None:
                raise Refused(str(refusal)) from refusal
            budgets[named[1].replace("-", "_")], said = named[2].replace(" ", ""), refusal
        else:
            return budgets
    raise AssertionError(f"refused {REFUSALS} times, each with what the one before named: {said}")


def weights(out):
    found = [safetensors.torch.load_file(path) for path in sorted(out.glob("*.safetensors"))]
    return {name: value for part in found for name, value in part.items()}


def check(seed, folder, options):
    case, folder, log = draw(seed), Path(folder), Log(folder)
    log(case)
    with contextlib.redirect_stderr(io.StringIO()):  # transformers shows its progress
        make_model(folder / "model")
    given = dict(case.options) | {"model": folder / "model", "data": make_jsonl(folder / "data.jsonl", 80)}
    if case.needs_disk:
        (folder / "disk").mkdir()
        given["disk"] = folder / "disk"
    if case.evaluates:
        given |= {"eval_data": (folder / "data.jsonl",), "eval_every": 2}
    budgets = smallest_budgets(case, given, folder, log) if case.tight else {}
    log(budgets)
    whole, parts = folder / "whole", folder / "parts"
    over = run(**given | budgets, out=whole, steps=STEPS)
    with stopped_after(case.stops_after):
        run(**given | budgets, out=parts, steps=STEPS)
    log("stopped")
    over += run(**given | ({} if case.frees else budgets), out=parts, steps=STEPS)
    problems = [f"over budget: {one}" for one in over]
    if losses(whole) != losses(parts):
        problems.append(f"other losses than of the run that was not stopped: {losses(parts)}, {losses(whole)}")
    if names := differing(weights(whole), weights(parts)):
        problems.append(f"{len(names)} weights differ from the run that was not stopped: {names[:4]}")
    return problems


if __name__ == "__main__":
    main("trained", check)
