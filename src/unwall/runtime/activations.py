"""What a plan asks for activations: kept, computed again in backward, or moved to the host meanwhile.

With ``"host"`` the repeated blocks are recomputed from their inputs, and those inputs wait on the host. In a model without such
blocks everything that autograd saves does: that is far more than a link carries while it is computed.
"""

import warnings

import torch
from torch import nn

from unwall.runtime.engine import Engine
from unwall.runtime.recompute import recompute_blocks
from unwall.runtime.saved_on_host import SavedOnHost


def arrange_activations(engine: Engine, model: nn.Module) -> None:
    """Does what the plan says. ``"keep"`` is what autograd does anyway."""
    kind = engine.plan.activations
    if kind in ("recompute", "host"):
        found = recompute_blocks(model)
        if kind == "recompute" and not found:
            _say_nothing_is_recomputed(model)
    if kind == "host":
        saved, staying = engine.forward.saved, engine.staying

        def is_state(tensor: torch.Tensor) -> bool:
            return tensor.untyped_storage()._cdata in staying or saved.group_of(tensor) is not None

        saved.layers.append(SavedOnHost(engine.tiers.links, engine.tiers.host, engine.device.device, is_state))


def _say_nothing_is_recomputed(model: nn.Module) -> None:
    if getattr(model, "is_gradient_checkpointing", False):
        why = "checkpoints already"
    else:
        why = (
            "has no repeated blocks (children of a ModuleList or a Sequential that have children of their own): wrap what "
            "should be recomputed in torch.utils.checkpoint"
        )
    warnings.warn(f"Plan(activations='recompute') changes nothing: {type(model).__name__} {why}", stacklevel=4)
