"""What ``state_dict`` gave of a model, and whether anyone has written to it.

[Note: copies]
What torch's ``state_dict`` gives shares memory with the parameters, and there are loops that load by writing to it
(``model.state_dict()[name].copy_(value)``). Ours gives copies, plain tensors. A write to one is an error at the next edge, as
long as the parameters have not changed. Version counters tell of most writes. Those through ``.data`` or a numpy array count
nowhere: checksums tell of them, at the first edge and when the tensor goes. The memory is referred to here, too, but no longer
than its tensor lives, or, where someone has a part of it then (``.data``, which outlives the tensor in the loop above), up to
the next edge.
"""

import os
import sys
import weakref
from collections.abc import Callable

import torch

from unwall.native import interrupts
from unwall.native.checksum import crc32
from unwall.shards.flat import storage_uses


class Given:
    """One tensor that the user was given."""

    def __init__(self, name: str, tensor: torch.Tensor, gone: "Callable[[weakref.ref[torch.Tensor]], None]") -> None:
        self.name = name
        self.looked_at = False
        self.ref = weakref.ref(tensor, gone)
        self._alias = tensor.detach()  # has the same version counter
        self._version = 0 if tensor.is_inference() else self._alias._version
        self._sum = _sum(self._alias)
        self._bytes = self._alias.untyped_storage().nbytes()
        self._uses = storage_uses(self._alias)

    @property
    def is_held(self) -> bool:
        """Where the tensor goes: whether anybody else has a part of it."""
        uses = storage_uses(self._alias)
        return uses is None or self._uses is None or uses > self._uses

    @property
    def counted(self) -> bool:
        """Whether the version counter tells of a write."""
        return not self._alias.is_inference() and self._alias._version != self._version

    @property
    def written(self) -> bool:
        if self._alias.untyped_storage().nbytes() != self._bytes:
            return False  # the user has freed the memory under the tensor: there is nothing to look at
        return self.counted or _sum(self._alias) != self._sum


class GivenCopies:
    """All of them since the parameters have last changed. See [Note: copies]."""

    def __init__(self, version: Callable[[], int]) -> None:
        """``version``: counts changes of the parameters."""
        self._version = version
        self._at = -1
        self._given: dict[int, Given] = {}
        self._orphans: list[Given] = []
        """Those whose tensor is gone, while someone has a part of it."""
        self._written: dict[str, None] = {}
        self._process = os.getpid()

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """The user is about to be given it."""
        if self._at != self._version():
            self.clear()
            self._at = self._version()
        key, me, is_finalizing = id(tensor), weakref.ref(self), sys.is_finalizing
        known = self._given.get(key)
        if known is not None and known.ref() is tensor:
            return  # two modules share the parameter

        def gone(ref: "weakref.ref[torch.Tensor]") -> None:
            if is_finalizing():  # tensors at a script's top level go when this module is empty already
                return
            copies = me()
            if copies is not None:
                copies._gone(key, ref)

        self._given[key] = Given(name, tensor, gone)

    def clear(self) -> None:
        """Whatever was written so far does not matter."""
        self._given.clear()
        self._orphans.clear()
        self._written.clear()

    def written(self) -> list[str]:
        """The names of those that were written, once."""
        if not self._given and not self._written and not self._orphans:
            return []
        if self._at != self._version():
            self.clear()
            return []
        orphans, self._orphans = self._orphans, []
        for given in (*list(self._given.values()), *orphans):
            if given.counted or (not given.looked_at and given.written):
                self._written[given.name] = None
            given.looked_at = True
        found = list(self._written)
        if found:
            self.clear()
        return found

    def _gone(self, key: int, ref: "weakref.ref[torch.Tensor]") -> None:
        """The user has let go of a tensor. In any thread, and anywhere in it: nobody would see an exception."""
        with interrupts.finalizing:
            given = self._given.get(key)
            if given is None or given.ref is not ref:
                return
            del self._given[key]
            if os.getpid() != self._process or self._at != self._version():
                return
            if given.is_held:
                given.looked_at = False
                self._orphans.append(given)
            elif given.written:
                self._written[given.name] = None


def _sum(tensor: torch.Tensor) -> int:
    flat = tensor.contiguous()
    return crc32(flat.data_ptr(), flat.nbytes) if flat.nbytes and flat.device.type == "cpu" else 0
