"""What a pass needs besides its repeated blocks, by the shapes of what lies outside of them: the head, and the loss over it.

For the first pass alone, of which nothing is known yet; then it is measured (runtime/activation_room.py). A head gives so many
numbers for each token, and its loss needs them several times over: as they are, in fp32, and the gradients of both.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import nn

LOSS_BYTES = 12
"""For each number that a head gives: the logarithms of its softmax, their gradient, and its own, in fp32."""
GRADIENT_BYTES = 4
"""For each element of a head's matrix: a gradient that is added up in fp32."""


class Beside:
    """The matrices of ``model`` that are in none of its ``blocks``."""

    def __init__(self, model: nn.Module, blocks: Sequence[nn.Module]) -> None:
        inside = {id(param) for block in blocks for param in block.parameters()}
        params = (param for param in model.parameters() if id(param) not in inside and param.ndim == 2)
        self._matrices = {(param.shape, param.element_size()) for param in params}

    def nbytes(self, given: Iterable[torch.Tensor]) -> int:
        """At most, where the blocks are given these."""
        first = next((tensor.shape for tensor in given if tensor.ndim > 1), None)
        return 0 if first is None else max((_needed(*matrix, first) for matrix in self._matrices), default=0)


def _needed(matrix: torch.Size, item_bytes: int, shape: torch.Size) -> int:
    """Rows of a matrix are what it gives. Where it takes what blocks give it does so for each token, otherwise for each sample:
    what images become is averaged before."""
    rows, columns = matrix
    tokens = shape.numel() // max(1, shape[-1]) if shape[-1] == columns else shape[0]
    return rows * (tokens * (item_bytes + LOSS_BYTES) + columns * (item_bytes + GRADIENT_BYTES))
