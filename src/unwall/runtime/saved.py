"""What autograd saves in forward, on its way back out in backward.

[Note: saved tensors]
Hooks on outputs fetch a group before its backward. Some reads come another way: a detached weight, a graph that is
differentiated twice, a tensor kept aside on the module. What autograd saved of a flat buffer is therefore unpacked through
here, and the group is made resident first. Only where groups come and go at all. Autograd does not compare versions of what
goes through hooks, so that is done here: a tensor that was changed since it was saved is an error.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from unwall.shards.group import Group


class SavedTensors:
    """See [Note: saved tensors]. ``unpacking`` is told of each group before backward gets a tensor of it."""

    def __init__(self, groups: Sequence[Group], unpacking: Callable[[int], None]) -> None:
        self._groups = groups
        self._unpacking = unpacking
        self._flats = {group.flat.untyped_storage()._cdata: group.index for group in groups if group.evictable}
        self._watching = False

    @property
    def streams(self) -> bool:
        """Whether there are groups that come and go."""
        return bool(self._flats)

    def group_of(self, tensor: torch.Tensor) -> int | None:
        """The group that comes and goes of which this is a view."""
        return self._flats.get(tensor.untyped_storage()._cdata)

    def watch(self) -> None:
        """From now on what is saved goes through here."""
        if self.streams:
            torch._C._autograd._push_saved_tensors_default_hooks(self._pack, self._unpack)
            self._watching = True

    def unwatch(self) -> None:
        if self._watching:
            torch._C._autograd._pop_saved_tensors_default_hooks()
            self._watching = False

    def _pack(self, tensor: torch.Tensor) -> Any:
        # Detached: a node that saves its own output would otherwise hold itself, and an abandoned graph would never go.
        return self.group_of(tensor), tensor.detach(), None if tensor.is_inference() else tensor._version

    def _unpack(self, packed: Any) -> torch.Tensor:
        index, tensor, version = packed
        assert isinstance(tensor, torch.Tensor)
        if version is not None and tensor._version != version:
            what = "a tensor" if index is None else f"a parameter of group {self._groups[index].name}"
            raise RuntimeError(
                f"backward needs {what} as it was in forward, but it has been modified since by an inplace operation, or by an "
                "optimizer's step: run forward again"
            )
        if index is not None:
            self._unpacking(index)
        return tensor
