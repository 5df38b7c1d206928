"""How a finished call's backward is followed: hooks that tell where it begins and where it ends."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from unwall.native import interrupts
from unwall.runtime.backward import Backward
from unwall.runtime.boundary import boundary_nodes
from unwall.runtime.calls import Call
from unwall.runtime.outputs import tensors_in


def follow(
    call: Call, backward: Backward, outputs: Sequence[torch.Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> bool:
    """Tells ``backward`` when the gradient of a call's output is known and, for frozen parameters, when those of its inputs
    are out. False where that end cannot be found."""
    nodes = boundary_nodes(outputs, _inputs(args, kwargs)) if call.frozen else []
    call.open_nodes = -1 if nodes is None else len(nodes)
    for node in nodes or ():
        node.register_hook(lambda *_: _deferred(backward.node_done, call))
    for tensor in outputs:
        tensor.register_hook(lambda _: _deferred(backward.begins, call))
    return nodes is not None


def _inputs(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterable[torch.Tensor]:
    if not kwargs and len(args) == 1:
        return tensors_in(args[0])
    return tensors_in((args, kwargs))


def _deferred(tell: Callable[[Call], None], call: Call) -> None:
    with interrupts.deferred:
        tell(call)
