"""unwall: train models far larger than the accelerator's memory, without touching the model's code."""

from unwall import nn, sparse
from unwall._version import __version__
from unwall.api import from_pretrained, full_params, init, move, no_sync, pipeline, plan, probe, profile, shard, stats
from unwall.checkpoint.errors import CheckpointError
from unwall.checkpoint.load_weights import load_weights
from unwall.checkpoint.public import load, save
from unwall.checkpoint.weights_out import export_weights
from unwall.optim.adamw import AdamW
from unwall.optim.ema import ema
from unwall.optim.wrap import wrap
from unwall.parallel.tensor import parallelize
from unwall.plans import Plan, PlanError
from unwall.runtime.grads import grads
from unwall.shards.control import DivergedError, PeerError
from unwall.tiers.ledger import BudgetError

__all__ = [
    "AdamW",
    "BudgetError",
    "CheckpointError",
    "DivergedError",
    "PeerError",
    "Plan",
    "PlanError",
    "__version__",
    "ema",
    "export_weights",
    "from_pretrained",
    "full_params",
    "grads",
    "init",
    "load",
    "load_weights",
    "move",
    "nn",
    "no_sync",
    "parallelize",
    "pipeline",
    "plan",
    "probe",
    "profile",
    "save",
    "shard",
    "sparse",
    "stats",
    "wrap",
]
