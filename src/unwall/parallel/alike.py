"""Plans that differ from rank to rank are refused, by field and rank, before anything is allocated."""

from dataclasses import fields
from typing import Any

from unwall.plans import Plan, PlanError
from unwall.shards.collectives import Ranks
from unwall.shards.dimensions import Others

OWN = ("disk",)
"""Each rank may have its own: only whether there is one must be the same."""
BUDGETS = ("device_bytes", "host_bytes", "disk_bytes")
"""Tensor ranks may have different ones: the smallest decides."""

Said = tuple[tuple[int, ...], tuple[int, ...], dict[str, str]]
"""A rank's stage of a pipeline, its place among the tensor ranks, and its plan."""


def check_alike(plan: Plan, ranks: Ranks, others: Others | None) -> None:
    """PlanError, on every rank, where ranks with the same layers have different plans. All ranks call it together.

    Stages of a pipeline hold different layers, and may have plans of their own."""
    others = Others() if others is None else others
    everyone = ranks if others.everyone is None else others.everyone
    places = [tuple(each.ranks.rank for each in dimensions) for dimensions in (others.pipeline, others.tensor)]
    told = differences(everyone.every((*places, said_by(plan))))
    if told:
        raise PlanError(f"the ranks have different plans: {'; '.join(told)}. Give every rank the same plan")


def differences(every: list[Said]) -> list[str]:
    """Each field in which ranks differ that must not, with who says what."""
    found: dict[str, str] = {}
    for name in every[0][2]:
        alike: dict[tuple[object, ...], dict[str, list[int]]] = {}
        for rank, (stage, tensor, said) in enumerate(every):
            by_value = alike.setdefault((stage, tensor) if name in BUDGETS else (stage,), {})
            by_value.setdefault(said[name], []).append(rank)
        for by_value in alike.values():
            if len(by_value) > 1:
                parts = (f"{value} on rank{'s' * (len(on) > 1)} {_listed(on)}" for value, on in by_value.items())
                found.setdefault(name, f"{name} is {', '.join(parts)}")
    return list(found.values())


def said_by(plan: Plan) -> dict[str, str]:
    """Each field as it can be compared with another rank's. Functions are not: only whether one is given."""
    return {field.name: _shown(field.name, getattr(plan, field.name)) for field in fields(Plan)}


def _shown(name: str, value: Any) -> str:
    if callable(value):
        return "a function"
    return "a directory" if name in OWN and value is not None else repr(value)


def _listed(ranks: list[int], most: int = 8) -> str:
    more = f" and {len(ranks) - most} more" if len(ranks) > most else ""
    return ", ".join(map(str, ranks[:most])) + more
