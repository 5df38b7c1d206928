"""A checkpoint of a block whose input is kept in another form than the block is given it: in parts, or in other memory.

[Note: another form]
torch's checkpoint saves what its function is given, and runs the function on that again in backward. So the function is given
the other form. In forward it uses the input as it is, which is at hand; in backward it makes the input again from the form that
was saved. What it makes is no leaf, as a block may change its input in place, and nothing runs backward through it: gradients
go the way of the forward's own graph.
"""

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch.utils.checkpoint import checkpoint

Restore: TypeAlias = Callable[[torch.Tensor], torch.Tensor]


def checkpoint_keeping(
    kept: torch.Tensor,
    restore: Restore,
    at: int,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    context_fn: Any,
    named: dict[str, Any],
) -> Any:
    """torch's checkpoint, which keeps ``kept`` in the place of ``args[at]``. ``restore`` makes a new tensor of it."""
    waiting = [args[at]]  # only for the forward: held any longer, nothing would be saved

    def run(kept: torch.Tensor, *others: Any, **options: Any) -> Any:
        value = waiting.pop() if waiting else _Restored.apply(_ANCHOR, lambda: restore(kept))
        return function(*others[:at], value, *others[at:], **options)

    others = (*args[:at], *args[at + 1 :])
    del args
    return checkpoint(run, kept, *others, use_reentrant=False, context_fn=context_fn, **named)


def input_of(args: tuple[Any, ...]) -> tuple[int, torch.Tensor | None]:
    """The first of the arguments that a gradient is wanted of: the hidden state. Others (masks, positions, an encoder's output)
    are shared by all blocks, and kept once."""
    for at, value in enumerate(args):
        if isinstance(value, torch.Tensor) and value.requires_grad and value.is_floating_point():
            return at, value
    return 0, None


class _Restored(torch.autograd.Function):
    """See [Note: another form]."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, make: Callable[[], torch.Tensor]) -> torch.Tensor:  # noqa: ARG004
        return make()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:  # noqa: ARG004
        return None, None


_ANCHOR = torch.empty(0, requires_grad=True)
