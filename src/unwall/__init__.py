"""unwall: train models far larger than the accelerator's memory, without touching the model's code."""

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

from unwall._version import __version__

if TYPE_CHECKING:
    from unwall import nn, sparse
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

_HOMES = {
    "AdamW": "optim.adamw",
    "BudgetError": "tiers.ledger",
    "CheckpointError": "checkpoint.errors",
    "DivergedError": "shards.control",
    "PeerError": "shards.control",
    "Plan": "plans",
    "PlanError": "plans",
    "ema": "optim.ema",
    "export_weights": "checkpoint.weights_out",
    "grads": "runtime.grads",
    "load": "checkpoint.public",
    "load_weights": "checkpoint.load_weights",
    "parallelize": "parallel.tensor",
    "save": "checkpoint.public",
    "wrap": "optim.wrap",
}
"""Where the names are that are not in ``unwall.api``."""


def _load() -> None:
    """Puts everything in its place."""
    found = globals()
    for name in __all__:
        if name in ("nn", "sparse"):
            import_module(f"unwall.{name}")
        elif name not in found:
            found[name] = getattr(import_module(f"unwall.{_HOMES.get(name, 'api')}"), name)


def __getattr__(name: str) -> Any:
    """The first use, where torch came after unwall."""
    if not name.startswith("__"):
        _load()
        if name in globals():
            return globals()[name]
    raise AttributeError(f"module 'unwall' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


if "torch" in sys.modules:  # a program that trains. The command says its options, or starts processes, without torch
    _load()
