"""The optimizers that are saved and loaded with a model: one, or several under names."""

from collections.abc import Mapping, Sequence

import torch

from unwall.checkpoint.optimizer_entry import check_optimizer
from unwall.optim.sharded import ShardedOptimizer
from unwall.runtime.engine import Engine

Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | Mapping[str, torch.optim.Optimizer] | None
"""What ``save`` and ``load`` take."""
Trained = dict[str, ShardedOptimizer]
"""By name. One alone has the name ``""``, those of a list have their numbers."""


def check_optimizers(given: object, engine: Engine) -> Trained:
    """TypeError or ValueError for what cannot be saved or loaded with this model, or not now."""
    if isinstance(given, Mapping):
        named = dict(given)
    elif isinstance(given, Sequence) and not isinstance(given, str):
        named = {"" if len(given) == 1 else str(number): optimizer for number, optimizer in enumerate(given)}
    else:
        named = {"": given}
    found: Trained = {}
    for name, optimizer in named.items():
        if not isinstance(name, str) or (isinstance(given, Mapping) and not name):
            raise TypeError(f"an optimizer's name is a string that is not empty, got {name!r}")
        checked = check_optimizer(optimizer, engine)
        if checked is None:
            if given is not None:
                raise TypeError(f"optimizer {name!r} is None: leave it out")
        elif any(checked is other for other in found.values()):
            raise ValueError(f"{type(optimizer).__name__} is given twice: each optimizer is saved once")
        else:
            found[name] = checked
    return found


def of_optimizer(name: str) -> str:
    """For messages: whose it is."""
    return f" of optimizer {name!r}" if name else ""
