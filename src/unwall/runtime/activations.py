"""What a plan asks for activations: kept, computed again in backward, or moved to the host meanwhile."""

import torch
from torch import nn

from unwall.runtime.engine import Engine
from unwall.runtime.recompute import recompute_blocks
from unwall.runtime.saved_on_host import SavedOnHost


def arrange_activations(engine: Engine, model: nn.Module) -> None:
    """Does what the plan says. ``"keep"`` is what autograd does anyway."""
    if engine.plan.activations == "recompute":
        recompute_blocks(model)
    elif engine.plan.activations == "host":
        saved = engine.forward.saved
        stay = {param.untyped_storage()._cdata for group in engine.groups if not group.evictable for param in group.params}

        def is_state(tensor: torch.Tensor) -> bool:
            return tensor.untyped_storage()._cdata in stay or saved.group_of(tensor) is not None

        saved.layers.append(SavedOnHost(engine.tiers.links, engine.tiers.host, engine.device.device, is_state))
