"""Views of a flat buffer that hooks on saved tensors hold.

[Note: handed to hooks]
Hooks of the user may give back the very tensor they were given, alone or in something of theirs (``save_on_cpu`` without an
accelerator: in a tuple). It is read again only when backward asks for it, and then the group is made resident first. So it
counts as saved by autograd, for as long as it lives: a ``SavedViews`` goes with it. That holds only where nobody else can reach
it. So the hooks get an alias of their own, and what they packed is searched: tuples and closures, each with one holder. What
they keep elsewhere, or in objects that may change, counts as somebody else's.
"""

import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import FunctionType
from typing import Any

import torch

from unwall.shards.flat import SavedViews

DEPTH = 8
"""How deep tuples and closures are searched."""

_sample = [object()]
_ONE_HOLDER = sys.getrefcount(_sample[0])


def alias(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as a tensor that only the hooks have. A parameter stays what it is: it shows other memory when its group
    goes, so whoever has it holds nothing."""
    if type(tensor) is not torch.Tensor:
        return tensor
    return tensor.detach().requires_grad_(tensor.requires_grad)


class Claim:
    """Finds what counts as saved in what hooks packed. ``is_view``: whether a tensor is a view of the flat buffer."""

    def __init__(self, is_view: Callable[[torch.Tensor], bool], views: SavedViews) -> None:
        self._is_view = is_view
        self._views = views

    def search(self, packed: Sequence[Any], holders: int = 1, depth: int = DEPTH) -> None:
        """``packed`` and nobody else has the items that are claimed; ``holders`` is how often it does."""
        for index in range(len(packed) if depth else 0):
            if sys.getrefcount(packed[index]) >= _ONE_HOLDER + holders:
                continue
            found = packed[index]
            if type(found) is torch.Tensor:
                if self._is_view(found):
                    found._unwall_saved = self._views  # type: ignore[attr-defined]
            elif type(found) is tuple:
                self.search(found, depth=depth - 1)
            elif type(found) is FunctionType:
                self._search_closure(found.__closure__ or (), depth - 1)

    def _search_closure(self, cells: Sequence[Any], depth: int) -> None:
        for index in range(len(cells)):
            if sys.getrefcount(cells[index]) == _ONE_HOLDER:
                with suppress(ValueError):  # an empty cell
                    self.search([cells[index].cell_contents], 2, depth)  # the cell, and this list
