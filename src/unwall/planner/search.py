"""Trying plans one after the other.

[Note: what is tried]
For each kind of placement and each way to treat activations, the largest pass over the batch that fits is tried, and, where the
room that activations leave decides about placement, also the next smaller one. Those that cannot be faster than the best one
so far (compute alone takes longer, or what must go over a link does) are not simulated. Nor is a disk where the same work fits
without one, or where the device is too small whatever lies on disk. Nor are activations decided for each block where all are
kept in the same pass, or in smaller ones that take no longer than they compute.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from unwall.planner.activations import REPEATED
from unwall.planner.candidates import Allowance, Candidate, Short, build, device_room, shortage
from unwall.planner.hardware import Hardware
from unwall.planner.job import MAX_PLACED, Job
from unwall.planner.outline import Outline
from unwall.planner.pace import pace_of
from unwall.planner.predict import Prediction, bound_of, predict
from unwall.planner.workload import Workload
from unwall.tiers.ledger import BudgetError
from unwall.tiers.sizes import format_bytes

AS_FAST = 1.01
"""Two predictions that differ by less are the same."""


@dataclass(frozen=True)
class Verdict:
    """A plan that was looked at and not taken."""

    name: str
    workload: Workload
    reason: str
    """Why it lost."""
    step_s: float | None = None
    """As simulated; None where it does not fit or was ruled out before."""


@dataclass(frozen=True)
class Tried:
    """A candidate that fits, with its numbers."""

    candidate: Candidate
    job: Job
    prediction: Prediction


@dataclass(frozen=True)
class Slow:
    """A candidate that fits, but takes longer than another one whatever is overlapped."""

    least_s: float
    limit: str

    def __str__(self) -> str:
        return f"at least {self.least_s:.3g} s, limited by {self.limit}"


class Search:
    """See [Note: what is tried]. ``lost`` has one verdict for each placement that found no place in ``tried``."""

    def __init__(self, outline: Outline, hardware: Hardware, ranks: int, allowance: Allowance, dtype: torch.dtype) -> None:
        self.outline, self.hardware, self.ranks, self.allowance, self.dtype = outline, hardware, ranks, allowance, dtype
        self.tried: list[Tried] = []
        self.lost: dict[str, Verdict] = {}
        self._params = sum(1 for _ in outline.module.parameters())
        self._pace = pace_of(hardware, dtype)
        self._device_too_small: set[Workload] = set()
        self._fitting: list[Candidate] = []
        """Those that were tried, and those that fit and are too slow."""
        self.starved = True
        """Activations alone were too much for the device, whatever becomes of them."""

    def run(self, listed: Sequence[Candidate], *, stop_early: bool, bounds: bool = False) -> None:
        """``stop_early``: only speed counts, so what computes for longer than the best step so far is out. ``bounds``: what
        cannot win is not simulated either, so that nobody learns how long it takes."""
        left: dict[tuple[str, str], int] = {}
        for candidate in sorted(listed, key=lambda each: self.compute_s(each.workload)):  # stable: placements stay in order
            key = (candidate.name, candidate.workload.activations)
            if left.get(key) == 0:
                continue
            reason = self._too_slow(candidate) if stop_early else None
            if reason is not None:
                self.lost.setdefault(candidate.name, Verdict(candidate.name, candidate.workload, reason))
                continue
            best = self._fastest() if stop_early and bounds else float("inf")
            made = self._needless(candidate) or self._try(candidate, AS_FAST * best)
            if isinstance(made, Tried):
                self.tried.append(made)
            else:
                self.lost[candidate.name] = Verdict(candidate.name, candidate.workload, str(made))
            if isinstance(made, Tried | Slow):
                self._fitting.append(candidate)
                left[key] = left.get(key, 2 if candidate.budgeted and candidate.workload.batch > 1 else 1) - 1

    def compute_s(self, load: Workload) -> float:
        """The least time that the device computes for."""
        described, again = self.outline.description, load.activations in REPEATED
        once = described.flops(load.batch, load.seq, again) / self._pace.block_flops_per_s
        return load.passes * (once + (4 if again else 3) * self._pace.s_per_param * described.params)

    def _too_slow(self, candidate: Candidate) -> str | None:
        least = self.compute_s(candidate.workload)
        return f"at least {least:.3g} s of compute" if least >= self._fastest() else None

    def _fastest(self) -> float:
        """The shortest step so far."""
        return min((found.prediction.step_s for found in self.tried), default=float("inf"))

    def _needless(self, candidate: Candidate) -> str | None:
        """Why a plan need not be tried."""
        groups = self._params * (candidate.fields.get("tiles") or 1)
        if "params" not in candidate.fields and groups > MAX_PLACED:
            return f"not tried: {groups} parameters are too many to be placed one by one"
        if candidate.workload.activations == "auto" and any(self._keeps(found, candidate) for found in self._fitting):
            return "not needed: all activations are kept"
        if "disk" not in candidate.fields:
            return None
        if candidate.workload in self._device_too_small:
            return "no help: the device is too small, with everything on the host, too"
        load = candidate.workload
        same = [
            found.fields
            for found in self._fitting
            if found.workload.activations == load.activations and found.workload.batch >= load.batch
        ]
        if any("disk" not in fields for fields in same):
            return "not needed: it fits without a disk"
        if "params" in candidate.fields and any("params" not in fields for fields in same):
            return "not needed: it fits with less on disk"
        return None

    def _keeps(self, found: Candidate, candidate: Candidate) -> bool:
        """Whether a plan keeps all activations and could not be faster by other means."""
        load = found.workload
        if load.activations != "keep" or found.name != candidate.name:
            return False
        step_s = next((other.prediction.step_s for other in self.tried if other.candidate is found), float("inf"))
        return load.batch >= candidate.workload.batch or step_s <= 1.01 * self.compute_s(load)

    def look(self, candidate: Candidate) -> Tried | str:
        """The candidate with its numbers, or why it cannot be. From those that were tried, if it was."""
        same = (found for found in self.tried if found.candidate == candidate)
        found = next(same, None) or self._try(candidate)
        return found if isinstance(found, Tried) else str(found)

    def _try(self, candidate: Candidate, limit_s: float = float("inf")) -> "Tried | Slow | str":
        """The candidate with its numbers, or why it cannot be, or why it cannot be done in ``limit_s``."""
        allowance, load = self.allowance, candidate.workload
        spare = device_room(candidate, self.outline, allowance)
        if spare <= 0:
            self._device_too_small.add(load)
            there = min(allowance.device_bytes, allowance.device_budget_bytes or allowance.device_bytes)
            return f"activations alone need {format_bytes(there - spare)} on the device, there are {format_bytes(there)}"
        self.starved = False
        job, terms = build(candidate, self.outline, self.ranks, allowance, self.dtype, self.hardware)
        lack: Short | None = shortage(terms, allowance)
        if lack is not None:
            if lack.tier == "device" and candidate.fields.get("params") == "host":
                self._device_too_small.add(load)
            return str(lack)
        if limit_s < float("inf"):
            bound = bound_of(job, self.hardware)[1]
            if bound.step_s > limit_s:
                return Slow(bound.step_s, bound.limit)
        try:
            return Tried(candidate, job, predict(job, self.hardware))
        except BudgetError as error:
            asked, live, budget = (format_bytes(each) for each in (error.asked_bytes, error.live_bytes, error.budget_bytes))
            return f"what is in use at once needs {asked} more on the device, {live} of {budget} are taken"
