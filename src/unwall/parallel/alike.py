"""Plans that differ from rank to rank are refused, by field and rank, before anything is allocated."""

from dataclasses import fields
from typing import Any

from unwall.plans import Plan, PlanError
from unwall.shards.collectives import Ranks
from unwall.shards.dimensions import Others

OWN = ("disk",)
"""Each rank may have its own: only whether there is one must be the same."""


def check_alike(plan: Plan, ranks: Ranks, others: Others | None) -> None:
    """PlanError, on every rank, where ranks with the same layers have different plans. All ranks call it together.

    Stages of a pipeline hold different layers, and may have plans of their own."""
    everyone = ranks if others is None or others.everyone is None else others.everyone
    stage = () if others is None else tuple(dimension.ranks.rank for dimension in others.pipeline)
    every: list[tuple[tuple[int, ...], dict[str, str]]] = everyone.every((stage, said_by(plan)))
    told = [text for stage in dict.fromkeys(its for its, _ in every) for text in _apart(every, stage)]
    if told:
        raise PlanError(f"the ranks have different plans: {'; '.join(told)}. Give every rank the same plan")


def said_by(plan: Plan) -> dict[str, str]:
    """Each field as it can be compared with another rank's. Functions are not: only whether one is given."""
    return {field.name: _shown(field.name, getattr(plan, field.name)) for field in fields(Plan)}


def _shown(name: str, value: Any) -> str:
    if callable(value):
        return "a function"
    return "a directory" if name in OWN and value is not None else repr(value)


def _apart(every: list[tuple[tuple[int, ...], dict[str, str]]], stage: tuple[int, ...]) -> list[str]:
    """Each field in which the ranks of a stage differ, with who says what."""
    said = {rank: fields for rank, (its, fields) in enumerate(every) if its == stage}
    found = []
    for name in next(iter(said.values())):
        by_value: dict[str, list[int]] = {}
        for rank, its_fields in said.items():
            by_value.setdefault(its_fields[name], []).append(rank)
        if len(by_value) > 1:
            parts = (f"{value} on rank{'s' * (len(on) > 1)} {_listed(on)}" for value, on in by_value.items())
            found.append(f"{name} is {', '.join(parts)}")
    return found


def _listed(ranks: list[int], most: int = 8) -> str:
    more = f" and {len(ranks) - most} more" if len(ranks) > most else ""
    return ", ".join(map(str, ranks[:most])) + more
