"""Saving and resuming in one process, under budgets: ``python -m fuzz.resume --first 0 --count 50``.

Drawn: a model, an optimizer, a plan with budgets near the smallest that are accepted, when to stop, and how: with ``unwall.save``
(also beside training), or with the state dicts.

What must hold: a new model that loads what was kept, and trains on, comes to the bits of the run that did not stop. No tier ever
holds more than its budget. A budget that a refusal names is larger than what it refused, and ends in a plan that is accepted.
"""

import copy
import random
from dataclasses import dataclass
from pathlib import Path

import torch
from offload import differing, over_budget

import unwall
from fuzz import keeping as kept
from fuzz.command import Log, Refused, main
from unwall import BudgetError
from unwall.checkpoint.save import PendingSave

STEPS_AFTER = 3


@dataclass(frozen=True, kw_only=True)
class Case:
    keeping: kept.Keeping
    steps: int
    """Before what is kept."""
    by_save: bool
    """By ``unwall.save``, or else by state dicts."""
    steps_before_load: int


def draw(seed):
    rng = random.Random(f"{seed}-resume")
    by_save, loads_late = rng.random() < 0.6, rng.random() < 0.4
    return Case(keeping=kept.draw(seed), steps=rng.randint(0, 3), by_save=by_save, steps_before_load=int(loads_late))


def tokens(_):
    return torch.randint(0, kept.VOCABULARY, (4, 8))


def train(training, steps):
    for _ in range(steps):
        training.step(tokens)


class Checkpoint:
    """What ``unwall.save`` writes."""

    def __init__(self, training, path):
        self._path = path
        self._pending = unwall.save(path, training.model, training.optimizer, training.extra(), block=training.keeping.block)

    def wait(self):
        if isinstance(self._pending, PendingSave):
            self._pending.wait()

    def load(self, training):
        training.load_extra(unwall.load(self._path, training.model, training.optimizer))


class StateDicts:
    """What ``torch.save`` would write."""

    def __init__(self, training, path):
        self._parts = copy.deepcopy((training.model.state_dict(), training.optimizer.state_dict(), training.extra()))
        self._random = torch.get_rng_state()

    def wait(self):
        pass

    def load(self, training):
        model, optimizer, extra = self._parts
        training.model.load_state_dict(model)
        training.optimizer.load_state_dict(optimizer)
        training.load_extra(extra)
        torch.set_rng_state(self._random)


def begin(keeping, fields, budgets, seed):
    """A new training; an average or an optimizer may need more than the model alone, and be refused, too."""
    return kept.until_accepted(lambda tried: kept.begin(keeping, {**fields, **tried}, seed), budgets)


def start(keeping, fields):
    try:
        return begin(keeping, fields, kept.tight_budgets(keeping, fields), seed=0)
    except (ValueError, BudgetError) as error:  # options that do not go together
        raise Refused(str(error)) from error


def stop(case, whole, folder, log):
    """Keeps what the run has after some steps; the run itself goes on."""
    torch.manual_seed(5)
    train(whole, case.steps)
    checkpoint = (Checkpoint if case.by_save else StateDicts)(whole, Path(folder) / "checkpoint")
    log("kept")
    train(whole, STEPS_AFTER)
    checkpoint.wait()
    return checkpoint


def resume(case, fields, budgets, checkpoint, log):
    """A new model with other values, which a load replaces: also those that have been trained."""
    resumed, _ = begin(case.keeping, fields, budgets, seed=1)
    train(resumed, case.steps_before_load)
    checkpoint.load(resumed)
    log("loaded")
    train(resumed, STEPS_AFTER)
    return resumed


def check(seed, folder, options):
    case, log = draw(seed), Log(folder)
    log(case)
    disk = Path(folder) / "disk"
    disk.mkdir()
    fields = case.keeping.plan_fields(disk)
    whole, budgets = start(case.keeping, fields)
    log(budgets)
    checkpoint = stop(case, whole, folder, log)
    resumed = resume(case, fields, budgets, checkpoint, log)
    wanted, got = whole.outcome(), resumed.outcome()
    problems = [f"over budget: {over}" for run in (whole, resumed) for over in over_budget(run.model)]
    if names := differing(wanted, got):
        problems.append(f"{len(names)} of {len(wanted)} values differ from the run that did not stop: {names[:4]}")
    return problems


if __name__ == "__main__":
    main("resume", check)
