"""unwall: train models far larger than the accelerator's memory, without touching the model's code."""

from unwall._version import __version__
from unwall.api import full_params, init, no_sync, plan, probe, profile, shard, stats
from unwall.optim.adamw import AdamW
from unwall.optim.wrap import wrap
from unwall.plans import Plan, PlanError
from unwall.runtime.grads import grads
from unwall.tiers.ledger import BudgetError

__all__ = [
    "AdamW",
    "BudgetError",
    "Plan",
    "PlanError",
    "__version__",
    "full_params",
    "grads",
    "init",
    "no_sync",
    "plan",
    "probe",
    "profile",
    "shard",
    "stats",
    "wrap",
]
