"""Saving with some ranks, and resuming with others: ``python -m fuzz.elastic --first 0 --count 50``.

Drawn: what ``fuzz.resume`` draws, without budgets; a stage; packed gathers; how many ranks save (one to three), and how many
load, at another stage, on other tiers, cut into other tiles.

What must hold: loaded by as many ranks with the same plan, values are those that were saved, and training on gives the bits of
the run that did not stop. Loaded by any ranks with any plan, values are those that were saved, and training goes on.
"""

import dataclasses
import random
import warnings
from pathlib import Path

import torch
from offload import differing
from ranks import rank_and_world

import unwall
from fuzz import keeping as kept
from fuzz.command import LIMIT_S, Log, main
from fuzz.pools import pool_of

STEPS_AFTER = 2
SAME, OTHER = "same plan", "other plan"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    keeping: kept.Keeping
    elsewhere: kept.Keeping
    """The same training with the other plan."""
    worlds: tuple[int, int]
    """How many ranks save, and how many load with the other plan."""
    steps: int
    """Before what is kept."""
    by_save: bool
    """By ``unwall.save``, or else by state dicts: each rank loads its own, and with the other plan all load those of rank 0."""


def draw(seed):
    rng = random.Random(f"{seed}-elastic")
    keeping = kept.draw(seed)
    fields = {name: value for name, value in keeping.fields if (name, value) != ("grads", "transient")}  # that is for one rank
    fields["stage"] = rng.choice((3, 3, 2, 1, 0))
    if rng.random() < 0.2 and fields["compute_dtype"] != torch.float32:
        fields["gather_dtype"] = "int8"
    keeping = dataclasses.replace(keeping, fields=tuple(fields.items()), shares=None)
    return Case(
        keeping=keeping,
        elsewhere=elsewhere(keeping, rng.choice(tuple(kept.TIERS)), rng),
        worlds=(rng.choice((1, 2, 3)), rng.choice((1, 2, 3))),
        steps=rng.randint(0, 3),
        by_save=rng.random() < 0.7,
    )


def elsewhere(keeping, tiers, rng):
    """The same training at another stage and on other tiers."""
    fields = {name: value for name, value in keeping.fields if name not in ("params", "grads", "optimizer")}
    fields |= kept.TIERS[tiers] | {"stage": rng.choice((3, 3, 2, 1, 0))}
    if "states" not in fields:
        fields["tiles"] = rng.choice((None, 2, 3))
    needs_disk = keeping.needs_disk or "disk" in fields.values()
    return dataclasses.replace(keeping, fields=tuple(fields.items()), needs_disk=needs_disk)


def in_rank(keeping, folder, name, seed):
    """A training in this rank, and its log."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    rank, _ = rank_and_world()
    disk = Path(folder) / f"disk of {name}, rank {rank}"
    disk.mkdir()
    log = Log(folder, f"{name}, rank {rank}")
    log(keeping)
    return kept.begin(keeping, keeping.plan_fields(disk), seed), log


def train(training, first, count):
    rank, _ = rank_and_world()
    for step in range(first, first + count):
        draws = torch.Generator().manual_seed(1000 * step + rank)
        training.step(lambda _, draws=draws: torch.randint(0, kept.VOCABULARY, (4, 8), generator=draws))


def whole(case, folder):
    """The run that does not stop: what it keeps, and what it comes to."""
    rank, _ = rank_and_world()
    training, log = in_rank(case.keeping, folder, "whole", seed=0)
    torch.manual_seed(rank)
    train(training, 0, case.steps)
    before, pending = training.outcome(), None
    if case.by_save:
        block = case.keeping.block
        pending = unwall.save(Path(folder) / "checkpoint", training.model, training.optimizer, training.extra(), block=block)
    else:
        parts = training.model.state_dict(), training.optimizer.state_dict(), training.extra(), torch.get_rng_state()
        torch.save(parts, state_dicts(folder, rank))
    log("kept")
    train(training, case.steps, STEPS_AFTER)
    if case.by_save and not case.keeping.block:
        pending.wait()
    return before, training.outcome()


def resumed(case, keeping, folder, name):
    """What is there after a load, and after it has trained on."""
    rank, _ = rank_and_world()
    training, log = in_rank(keeping, folder, name, seed=1)
    load(case, training, folder, rank if name == SAME else 0)
    log("loaded")
    loaded = training.outcome()
    train(training, case.steps, STEPS_AFTER)
    return loaded, training.outcome()


def load(case, training, folder, rank):
    """State dicts are those that this rank has kept."""
    if case.by_save:
        training.load_extra(unwall.load(Path(folder) / "checkpoint", training.model, training.optimizer))
        return
    model, optimizer, extra, random_state = torch.load(state_dicts(folder, rank), weights_only=False)
    training.model.load_state_dict(model)
    training.optimizer.load_state_dict(optimizer)
    training.load_extra(extra)
    torch.set_rng_state(random_state)


def state_dicts(folder, rank):
    return Path(folder) / f"state dicts of rank {rank}.pt"


def check(seed, folder, options):
    case = draw(seed)
    savers, loaders = (pool_of(world) for world in case.worlds)
    kept_there, wanted = savers.run(whole, case, folder, limit_s=LIMIT_S)[0]
    found, got = savers.run(resumed, case, case.keeping, folder, SAME, limit_s=LIMIT_S)[0]
    found_elsewhere, _ = loaders.run(resumed, case, case.elsewhere, folder, OTHER, limit_s=LIMIT_S)[0]
    return [
        *problem("loaded with the same plan", kept_there, found),
        *problem("trained on with the same plan", wanted, got),
        *problem(f"loaded by {case.worlds[1]} instead of {case.worlds[0]} ranks", kept_there, found_elsewhere),
    ]


def problem(what, wanted, got):
    names = differing(wanted, got)
    return [f"{what}: {len(names)} of {len(wanted)} values differ: {names[:4]}"] if names else []


if __name__ == "__main__":
    main("elastic", check)
