"""unwall: train models far larger than the accelerator's memory, without touching the model's code."""

from unwall.api import full_params, init, no_sync, profile, shard, stats
from unwall.optim.adamw import AdamW
from unwall.optim.wrap import wrap
from unwall.plan import Plan, PlanError
from unwall.tiers.ledger import BudgetError

__all__ = ["AdamW", "BudgetError", "Plan", "PlanError", "full_params", "init", "no_sync", "profile", "shard", "stats", "wrap"]
