"""unwall: train models far larger than the accelerator's memory, without touching the model's code."""

from unwall._version import __version__
from unwall.api import full_params, init, no_sync, plan, probe, profile, shard, stats
from unwall.optim.adamw import AdamW
from unwall.optim.wrap import wrap
from unwall.plan import Plan, PlanError
from unwall.tiers.ledger import BudgetError

# `unwall.plan` is the function; the module of that name is reached by `from unwall.plan import Plan`.
__all__ = [
    "AdamW",
    "BudgetError",
    "Plan",
    "PlanError",
    "__version__",
    "full_params",
    "init",
    "no_sync",
    "plan",
    "probe",
    "profile",
    "shard",
    "stats",
    "wrap",
]
