"""Transforms of ``torch.func`` (grad, jvp, vmap) around or inside a model.

Inside one, every tensor that an operation gives is wrapped and has no memory to copy to. What the engine does for a module is
not part of the function that is transformed, so it is done outside.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch

_NOTHING: AbstractContextManager[object] = nullcontext()


def inside() -> bool:
    """Whether a transform is under way."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def outside() -> AbstractContextManager[object]:
    """Inside it no transform is under way."""
    if not inside():
        return _NOTHING
    from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack  # there already, inside a transform

    return temporarily_clear_interpreter_stack()


is_wrapped: Callable[[torch.Tensor], bool] = torch._C._functorch.is_functorch_wrapped_tensor
"""Whether a tensor is one that a transform works with, which has no storage of its own."""
