"""A checkpoint of a block whose input is kept in another form than the block is given it: in parts, or in other memory.

[Note: another form]
torch's checkpoint saves what its function is given, and runs the function on that again in backward. So the function is given
the other form. In forward it uses the input as it is, which is at hand; in backward it makes the input again from the form that
was saved. What it makes is no leaf, as a block may change its input in place, and nothing runs backward through it: gradients
go the way of the forward's own graph.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

import torch
from torch.utils.checkpoint import checkpoint, noop_context_fn

from unwall.tiers.arena import Arena
from unwall.tiers.input_stack import InputStack, Pass

MIN_BYTES = 1 << 20
"""Smaller inputs stay where they are: torch keeps what is small apart by itself."""
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


class InArena:
    """Keeps copies of the inputs of recomputed blocks in an arena ([Note: arenas] in tiers/arena.py), one behind the other.
    A copy costs little against the block, and the memory that blocks compute in is not broken up by what waits for backward."""

    def __init__(self, arena: Arena) -> None:
        self._device, self._stack = arena.device, InputStack(arena)

    def checkpoint(
        self,
        function: Callable[..., Any],
        *args: Any,
        use_reentrant: bool = False,  # noqa: ARG002 (as torch's checkpoint takes it)
        context_fn: Any = noop_context_fn,
        **named: Any,
    ) -> Any:
        """torch's checkpoint, of which the block's input is kept in the arena."""
        at, given = input_of(args)
        if given is None or torch.compiler.is_compiling() or not self._takes(given):
            return checkpoint(function, *args, use_reentrant=False, context_fn=context_fn, **named)
        kept, begun = self._stack.copy_of(given)
        # A block that changes its input in place must not change what is kept of it.
        return checkpoint_keeping(kept, partial(_clone, begun), at, function, args, context_fn, named)

    def _takes(self, given: torch.Tensor) -> bool:
        if type(given) is not torch.Tensor or given.device != self._device:
            return False
        return given.nbytes >= MIN_BYTES and given.is_contiguous()


def _clone(begun: Pass, kept: torch.Tensor) -> torch.Tensor:  # noqa: ARG001 (held for as long as what is kept)
    return kept.clone()


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


with torch.inference_mode(False):  # whatever the program is about when it first uses unwall
    _ANCHOR = torch.empty(0, dtype=torch.float32, device="cpu", requires_grad=True)
