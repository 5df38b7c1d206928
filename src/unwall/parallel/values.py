"""Which values a model starts from, where some ranks hold other parts of it."""

import torch
from torch import nn

from unwall.runtime.init import whole_value
from unwall.shards.dimensions import Others
from unwall.shards.local import is_distributed


def start_value(others: Others | None, param: nn.Parameter) -> torch.Tensor | None:
    """A parameter's local value, or None on the meta device. What is no DTensor is the same on all tensor ranks: rank 0's.
    Replicas start from the first one's."""
    value = whole_value(param)
    if value is None or others is None:
        return value
    sources = [dimension.ranks for dimension in others.tensor] if not is_distributed(param) else []
    sources += [others.replicas] if others.replicas is not None else []
    if not sources:
        return value
    value = value.to(sources[0].device).contiguous()
    for ranks in sources:
        ranks.broadcast(value)
    return value
