"""What stays whole on the device beside the groups: buffers, and what the plan ignores."""

import torch
from torch import nn

from unwall.runtime.engine import Engine
from unwall.shards.build import ignored


def place_ignored(engine: Engine, model: nn.Module) -> None:
    """What the plan ignores is whole, on the device. All ranks start from rank 0's values."""
    for name, param in model.named_parameters():
        if id(param) in engine.places or id(param) in engine.ignored or not ignored(engine.plan, name, param):
            continue
        with torch.no_grad():
            param.data = param.data.to(engine.device.device).contiguous()
            if param.numel():
                engine.ranks.broadcast(param.data)
        engine.ignored[id(param)] = param


def place_buffers(engine: Engine, owners: list[nn.Module]) -> None:
    """Buffers are whole, on the device. All ranks start from rank 0's."""
    for owner in owners:
        for name, buffer in owner._buffers.items():
            if buffer is None or buffer.is_meta:
                continue
            if buffer.device != engine.device.device:
                buffer = owner._buffers[name] = buffer.to(engine.device.device)
            if engine.ranks.size > 1 and buffer.numel():
                values = buffer.detach().contiguous().reshape(-1)
                engine.ranks.broadcast(values.view(torch.uint8))
                buffer.copy_(values.view(buffer.shape))
