"""Plain optimizers over sharded parameters are refused."""

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from unwall.optim.sharded import ShardedOptimizer
from unwall.runtime.hooks import engine_of

_guarded = False


def guard_plain_optimizers() -> None:
    """A plain torch optimizer over sharded parameters would update placeholders, and nothing that counts: say so."""
    global _guarded
    if _guarded:
        return
    _guarded = True

    def check(optimizer: torch.optim.Optimizer, *_: object) -> None:
        if isinstance(optimizer, ShardedOptimizer) or getattr(optimizer, "_unwall_inner", False):
            return
        if any(engine_of(param) is not None for group in optimizer.param_groups for param in group["params"]):
            raise RuntimeError(
                f"{type(optimizer).__name__} was built over a sharded model's parameters and would update placeholders: "
                "use unwall.AdamW(model.parameters(), ...) or unwall.wrap(optimizer), after unwall.shard"
            )

    register_optimizer_step_pre_hook(check)
