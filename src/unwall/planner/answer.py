"""The answer to "does it fit, and how fast?" in a few lines. The tables behind it are in report.py."""

import dataclasses
from typing import Any

from unwall.planner.activations import words
from unwall.planner.choose import ChosenPlan
from unwall.planner.memory import ACTIVATIONS, IGNORED
from unwall.planner.words import count, seconds
from unwall.plans import Plan
from unwall.schedule.activations import everywhere
from unwall.tiers.ledger import TierName
from unwall.tiers.sizes import format_bytes, written_bytes

_TIERS: tuple[TierName, ...] = ("device", "host", "disk")


def answer(plan: ChosenPlan) -> str:
    """``6.44 B parameters on 4090 PC: fits; device 21.4 GiB of 24.0 GiB, ...; 6.1 s per step, limited by disk writes; ...``."""
    many = f", {plan.ranks} ranks" if plan.ranks > 1 else ""
    first = f"{count(plan.model_params)} parameters on {plan.machine}{many}: fits"
    found = plan.prediction
    if found is None:
        return first
    used = dict(found.peak_bytes)
    used["device"] += found.terms["device"].get(ACTIVATIONS, 0) + found.terms["device"].get(IGNORED, 0)
    per = " per rank" if plan.ranks > 1 else ""
    tiers = ", ".join(f"{tier} {_of(used[tier], plan.rooms.get(tier))}" for tier in _TIERS if used[tier])
    speed = f"{seconds(found.step_s)} per step ({found.tokens_per_s:,.0f} tokens/s), limited by {found.bound.limit}"
    return "; ".join([first, f"{tiers}{per}", speed, *choices(plan)])


def choices(plan: ChosenPlan) -> list[str]:
    """What becomes of activations, and which layers are cut, and why."""
    found = []
    if plan.kept is not None:
        found.append(f"activations {kept_words(plan)}")
    if plan.workload.sequence_tiles > 1:
        found.append(f"MLPs in {plan.workload.sequence_tiles} sequence tiles, as one sample does not fit otherwise")
    if plan.weight_tiles > 1:
        found.append(f"weights in up to {plan.weight_tiles} tiles")
    return found


def kept_words(plan: ChosenPlan) -> str:
    """``recomputed (kept they take 96.0 GiB)``."""
    kept = plan.kept
    assert kept is not None
    said = words(kept)
    if said == "kept":
        return said
    everything = dataclasses.replace(kept, choices=everywhere("keep", kept.blocks))
    return f"{said} (kept they take {format_bytes(everything.device_bytes)})"


def code(plan: ChosenPlan) -> str:
    """The plan as one would write it."""
    shown = [f"{name}={value if name.endswith('dtype') else repr(value)}" for name, value in plan_fields(plan).items()]
    return f"unwall.Plan({', '.join(shown)})"


def plan_fields(plan: ChosenPlan) -> dict[str, Any]:
    """What differs from ``Plan()``, as JSON can hold it."""
    plain, default = plan.to_plan(), Plan()
    found: dict[str, Any] = {"stage": plan.stage}
    for name in vars(default):
        value = getattr(plain, name)
        if value == getattr(default, name):
            continue
        if name.endswith("_bytes"):
            found[name] = written_bytes(value)
        else:
            found[name] = value if isinstance(value, int | str) else str(value)
    return found


def _of(used: int, room: int | None) -> str:
    return format_bytes(used) if not room else f"{format_bytes(used)} of {format_bytes(room)}"
