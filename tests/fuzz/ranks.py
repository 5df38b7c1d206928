"""Any model, plan and training loop, over several ranks: ``python -m fuzz.ranks --ranks 2 --first 0 --count 50``.

Drawn: a chain of unlike blocks (adapters, experts, tied heads, checkpoints, gradients of gradients), which each rank may go
through in its own way; a plan with or without tight budgets; an optimizer; and a loop of passes, edits of gradients, writes,
loads, moves and failures.

What must hold: the values are those of a run without speculation, at stage 3 on the device, bit by bit; where results depend on
the plan in the last bit, those of the same plan without speculation. Where ranks use different modules, sums may be rounded in
another order. In fp32 they are those of plain PyTorch, which adds up the ranks' losses in one process.

Under tight budgets one rank may raise BudgetError in a pass and the others PeerError, where ranks use different modules. That
counts as refused, if the values are those of before the step.
"""

import dataclasses
import warnings
from dataclasses import dataclass
from pathlib import Path

import torch
from ranks import rank_and_world

from fuzz.command import LIMIT_S, Log, Refused, main
from fuzz.drawing import draw
from fuzz.pools import pool_of
from fuzz.scripts import Places
from fuzz.trainers import Plain, Sharded, StoppedError

BF16, FP32 = 1e-3, 2e-6
"""By how much values may differ where ranks use different modules."""
PLAIN = 2e-4
"""And from plain PyTorch's."""


@dataclass(frozen=True)
class Found:
    """What one rank has seen."""

    problems: list
    stopped: str | None = None
    """The name of the error, where a budget ran out here or on another rank."""
    said: str = ""


def differences(what, got, wanted, tolerance):
    """Of the values at the same moments: the first that is not the same, or not close. ``tolerance`` 0: bit by bit."""
    for (moment, some), (_, others) in zip(got, wanted, strict=True):
        for name, value in some.items():
            if not is_close(value, others[name], tolerance):
                return [f"{what}, {moment}: {name} differs by {(value - others[name]).abs().max().item():.3g}"]
    return []


def is_close(value, other, tolerance):
    return torch.equal(value, other) if tolerance == 0 else torch.allclose(value, other, rtol=tolerance, atol=tolerance)


class Runs:
    """The runs of one case in this rank."""

    def __init__(self, folder):
        rank, _ = rank_and_world()
        self._folder = Path(folder)
        self._mine = self._folder / f"rank{rank}"
        self._mine.mkdir()
        self.log = Log(folder, f"rank {rank}")

    def sharded(self, case, name, speculate):
        self.log(f"===== {name}, speculate={speculate}: {dataclasses.replace(case, script=())}")
        return Sharded(case, self.log, self._mine, self._folder / f"saves of {name}", speculate)

    def plain(self, case):
        self.log("===== plain PyTorch")
        return Plain(case, self.log).run()


def in_each_rank(case, folder):
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    runs = Runs(folder)
    trainer = runs.sharded(case, "the plan", case.speculate)
    try:
        got = trainer.run()
    except StoppedError as stop:
        return after_stop(case, runs, trainer, stop)
    other = case if case.rounds_by_places else dataclasses.replace(case, places=Places())
    wanted = runs.sharded(other, "the comparison", speculate=False).run()
    problems = differences("other values than without speculation, or on the device", got, wanted, bound_of(case))
    if case.dtype == torch.float32:
        problems += differences("other values than plain PyTorch's", wanted, runs.plain(case), PLAIN)
    return Found(problems)


def bound_of(case):
    """How far apart the values of two plans may be."""
    if not case.ranks_go_apart:
        return 0
    return BF16 if case.dtype == torch.bfloat16 else FP32


def after_stop(case, runs, trainer, stop):
    """The values must be those of a run that ends before the step where the budget ran out."""
    trainer.zero_all(to_none=True)
    got = [*trainer.looks, ("where it stopped", trainer.values())]
    shorter = dataclasses.replace(
        case, script=case.script[: stop.number], places=case.places if case.rounds_by_places else Places()
    )
    wanted = runs.sharded(shorter, "the comparison", speculate=False).run()
    return Found(differences("other values after a budget ran out", got, wanted, bound_of(case)), stop.cause, str(stop))


def check(seed, folder, options):
    case = draw(seed, options.ranks)
    every = pool_of(options.ranks).run(in_each_rank, case, folder, limit_s=LIMIT_S)
    problems = [f"[rank {rank}] {problem}" for rank, found in enumerate(every) for problem in found.problems]
    causes = {found.stopped for found in every}
    if causes == {None} or problems:
        return problems
    said = "; ".join(f"[rank {rank}] {found.said}" for rank, found in enumerate(every))
    if causes == {"BudgetError", "PeerError"} and case.ranks_go_apart:
        raise Refused(said)
    return [f"an accepted plan ran out of its budget: {said}"]


if __name__ == "__main__":
    main("ranks", check, ranks=2)
