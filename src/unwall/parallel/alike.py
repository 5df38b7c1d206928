"""Plans that differ from rank to rank are refused, by field and rank, before anything is allocated."""

from dataclasses import fields
from typing import Any

from unwall.plans import Plan, PlanError
from unwall.shards.collectives import Ranks
from unwall.shards.dimensions import Others

OWN = ("disk",)
"""Each rank may have its own: only whether there is one must be the same."""
BUDGETS = ("device_bytes", "host_bytes", "disk_bytes")
"""Machines may have different ones: the smallest decides."""

Said = tuple[tuple[int, ...], dict[str, str]]
"""A rank's stage of a pipeline, and its plan."""


def check_alike(plan: Plan, ranks: Ranks, others: Others | None) -> None:
    """PlanError, on every rank, where ranks with the same layers have different plans. All ranks call it together.

    Stages of a pipeline hold different layers, and may have plans of their own."""
    others = Others() if others is None else others
    everyone = ranks if others.everyone is None else others.everyone
    stage = tuple(each.ranks.rank for each in others.pipeline)
    told = differences(everyone.every((stage, said_by(plan))))
    if told:
        raise PlanError(f"the ranks have different plans: {'; '.join(told)}. Give every rank the same plan")


def differences(every: list[Said]) -> list[str]:
    """Each field in which ranks differ that must not, with who says what."""
    found: dict[str, str] = {}
    for name in every[0][1]:
        stages: dict[tuple[int, ...], dict[str, list[int]]] = {}
        for rank, (stage, said) in enumerate(every):
            stages.setdefault(stage, {}).setdefault(said[name], []).append(rank)
        for by_value in stages.values():
            if len(by_value) > 1:
                parts = (f"{value} on rank{'s' * (len(on) > 1)} {_listed(on)}" for value, on in by_value.items())
                found.setdefault(name, f"{name} is {', '.join(parts)}")
    return list(found.values())


def said_by(plan: Plan) -> dict[str, str]:
    """Each field as it can be compared with another rank's. Functions are not: only whether one is given."""
    names = [field.name for field in fields(Plan) if field.name not in BUDGETS]
    return {name: _shown(name, getattr(plan, name)) for name in names}


def _shown(name: str, value: Any) -> str:
    if callable(value):
        return "a function"
    return "a directory" if name in OWN and value is not None else repr(value)


def _listed(ranks: list[int], most: int = 8) -> str:
    more = f" and {len(ranks) - most} more" if len(ranks) > most else ""
    return ", ".join(map(str, ranks[:most])) + more
