"""Budgets of what changes after ``shard``: ``python -m fuzz.moves --first 0 --count 50``.

Drawn: what ``fuzz.resume`` draws, and one of: two moves to other tiers, with or without training before; a block that is thawed;
a new head; adapters. Budgets begin at one byte, and each refusal names what would do.

What must hold: a budget that a refusal names is larger than what it refused; after a few of them the change is accepted; training
then goes on, and no tier ever holds more than its budget.
"""

import dataclasses
import random
from pathlib import Path

import torch
from offload import over_budget
from torch import nn

import unwall
from fuzz import keeping as kept
from fuzz.command import Log, main
from unwall.plans import Plan

BUDGETS = ({"device_bytes": 1}, {"host_bytes": 1}, {"device_bytes": 1, "host_bytes": 1})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    keeping: kept.Keeping
    change: str
    """"move", "thaw", "head" or "adapters"."""
    tiers: tuple[str, str]
    """Of both moves; other changes begin on the first."""
    budgets: tuple[dict, dict]
    """Which are tight after each move."""
    late: bool
    """The optimizer is made after the first move."""


def draw(seed):
    rng = random.Random(f"{seed}-moves")
    keeping = kept.draw(seed)
    fields = {name: value for name, value in keeping.fields if name not in ("params", "grads", "optimizer")}
    fields["activations"] = rng.choice(("keep", "recompute"))
    if keeping.in_backward and rng.random() < 0.2:
        fields["grads"] = "transient"
    keeping = dataclasses.replace(keeping, fields=tuple(fields.items()), schedules=False, shares=None, needs_disk=True)
    tiers, how = tuple(kept.TIERS), rng.choice(("move", "move", "thaw", "head", "adapters"))
    return Case(
        keeping=dataclasses.replace(keeping, adapters=keeping.adapters and how != "adapters"),
        change=how,
        tiers=(rng.choice(tiers), rng.choice(tiers)),
        budgets=(rng.choice(BUDGETS), rng.choice(BUDGETS)),
        late=rng.random() < 0.4,
    )


def tokens(_):
    return torch.randint(0, kept.VOCABULARY, (4, 8))


def on(tiers, fields):
    """A plan's fields with other tiers; gradients that are not kept have none."""
    return fields | kept.TIERS[tiers] | ({"grads": "transient"} if fields.get("grads") == "transient" else {})


def train(training):
    for _ in range(2):
        training.step(tokens)


def moved(case, fields, log):
    """Moves twice, and trains after each move."""
    if case.late:
        training = kept.Training(case.keeping, unwall.shard(kept.build(case.keeping), Plan(**fields)), None, None, None)
    else:
        training = kept.begin(case.keeping, fields)
        train(training)
    problems = []
    for tiers, tight in zip(case.tiers, case.budgets, strict=True):
        _, budgets = kept.until_accepted(lambda tried, tiers=tiers: move(training, on(tiers, fields), tried), dict(tight))
        log("moved to", tiers, budgets)
        unwall.stats(training.model).reset()
        train(training)
        problems += [f"over budget on {tiers}: {over}" for over in over_budget(training.model)]
    return problems


def move(training, fields, budgets):
    """An optimizer that comes late may need more than the move did, and be refused, too."""
    unwall.move(training.model, Plan(**fields, **budgets))
    training.optimizer = training.optimizer or kept.optimizer_of(training.keeping, training.model)


def changed(case, fields, log):
    """Begins again with larger budgets whenever the model, what it becomes, or its optimizer is refused."""

    def attempt(tried):
        log("budgets", tried)
        model = kept.build(case.keeping)
        if case.change == "thaw":
            model.blocks[0].requires_grad_(False)
        unwall.shard(model, Plan(**on(case.tiers[0], fields), **tried))
        change(model, case.change)
        training = kept.Training(case.keeping, model, kept.optimizer_of(case.keeping, model), None, None)
        train(training)
        return over_budget(model)

    over, _ = kept.until_accepted(attempt, {"device_bytes": 1, "host_bytes": 1})
    return [f"over budget: {one}" for one in over]


def change(model, how):
    if how == "thaw":
        model.blocks[0].requires_grad_(True)
    elif how == "head":
        model.head = nn.Linear(32, kept.VOCABULARY)
    else:
        kept.adapt(model)


def check(seed, folder, options):
    case, log = draw(seed), Log(folder)
    log(case)
    disk = Path(folder) / "disk"
    disk.mkdir()
    fields = case.keeping.plan_fields(disk)
    torch.manual_seed(3)
    return moved(case, fields, log) if case.change == "move" else changed(case, fields, log)


if __name__ == "__main__":
    main("moves", check)
