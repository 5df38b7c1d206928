"""How a model is sharded inside another trainer: the plan, with what the trainer's own options say."""

from contextlib import suppress
from dataclasses import replace

import torch
from torch import nn

from unwall.api import engine
from unwall.plans import Plan
from unwall.runtime.engine import Engine

FOLDER = "unwall"
"""Within a checkpoint of a trainer: what ``unwall.save`` writes."""
DTYPES = {"no": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def engine_inside(model: nn.Module) -> Engine | None:
    """The engine of a sharded model, also where something was put around the model. None for one that is not sharded."""
    with suppress(RuntimeError):
        return engine(model)
    return None


def plan_for(plan: Plan | None, precision: str, passes: int, where: str) -> Plan:
    """The plan with what the trainer's own options say: its precision, and how many backwards add up."""
    plan = Plan(compute_dtype=DTYPES[precision]) if plan is None else plan
    if not isinstance(plan, Plan):
        raise TypeError(f"plan is an unwall.Plan or None, got {type(plan).__name__}")
    if plan.reduce_op != "mean":
        raise ValueError("Plan(reduce_op='sum'): trainers scale the loss for an average over the ranks, leave reduce_op out")
    usual = Plan.__dataclass_fields__["compute_dtype"].default
    if plan.compute_dtype not in (usual, DTYPES[precision]):
        raise ValueError(
            f"Plan(compute_dtype={plan.compute_dtype}), but {where} says {DTYPES[precision]}: say the same in both"
        )
    return replace(plan, compute_dtype=DTYPES[precision], passes=max(plan.passes, passes))


def check_precision(model: nn.Module, found: Engine, precision: str, where: str) -> None:
    """ValueError where a model that is sharded already computes in another dtype than the trainer says."""
    if found.plan.compute_dtype is not DTYPES[precision]:
        raise ValueError(
            f"{type(model).__name__} was sharded with compute_dtype={found.plan.compute_dtype}, but {where} says "
            f"{DTYPES[precision]}: say the same in both"
        )
