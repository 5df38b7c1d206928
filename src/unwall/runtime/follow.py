"""How a finished call's backward is followed: hooks that tell where it begins."""

from collections.abc import Sequence

import torch

from unwall.native import interrupts
from unwall.runtime.backward import Backward
from unwall.runtime.calls import Call


def follow(call: Call, backward: Backward, outputs: Sequence[torch.Tensor]) -> None:
    """Tells ``backward`` when the gradient of a call's output is known."""

    def begins(_: torch.Tensor) -> None:
        with interrupts.deferred:
            backward.begins(call)

    for tensor in outputs:
        tensor.register_hook(begins)
