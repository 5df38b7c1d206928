"""The flat buffer of a group on the device: memory that comes and goes under views that stay.

[Note: who else holds it]
Taking the memory away from a storage that someone else still reads (a ``.detach()``, a numpy array kept by the user) would end
the process. So the references to the storage are counted before: ours, and those of what autograd saved through our hooks. If
there are more, the storage is left to whoever has it, with the values of now, and the group gets another one at its next fetch.
That costs memory, so it is said once for each group. A thread of gloo's lets go of a collective's tensors a moment after it has
said that it is done: where a collective was the last to write, that moment is waited for. What only cycles of garbage hold (a
traceback and its frames) is collected first.

[Note: work in flight]
A copy or a collective may be writing when something raises, an interrupt among others. The buffer knows them from before they
start, and outwaits them before it gives memory back, whatever happens meanwhile.
"""

import gc
import sys
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

import torch

from unwall.shards.collectives import Collective
from unwall.shards.layout import Layout
from unwall.tiers.block import MemoryBlock
from unwall.tiers.device import DeviceTier

LOOKS, LOOK_S = 100, 0.001
"""How often it is looked whether a thread of gloo's has let go of what it has written, and the time between. No time in all:
where the machine does other things such a thread may not run for long, and then neither does the one that looks."""

COLLECTIONS = 2
"""So many collections of garbage in a row may be in vain: then it is not garbage that holds the buffers of this process."""

_uses: Callable[[int], int] | None = getattr(torch._C, "_storage_Use_Count", None)
"""References to a storage. Without it (it is private to torch) only storages that cannot be resized are noticed."""


def storage_uses(tensor: torch.Tensor) -> int | None:
    """References to the storage of a tensor. None where torch does not say."""
    return None if _uses is None else _uses(tensor.untyped_storage()._cdata)


class SavedViews:
    """Goes with each view of one storage that autograd holds through our own hooks: those who refer to it are counted. There is
    nothing to count down, so an exception out of nowhere cannot prevent it."""

    __slots__ = ()


class InFlight(Protocol):
    """A ticket, or a collective."""

    def wait(self) -> None: ...


class FlatBuffer:
    """``comes_and_goes``: its memory is taken at each ``fill`` and given back at each ``empty``."""

    in_vain = 0
    """Collections of garbage, in a row, that have let go of no buffer."""

    def __init__(self, device: DeviceTier, layout: Layout, name: str, comes_and_goes: bool) -> None:
        self._device = device
        self._layout = layout
        self._name = name
        self._comes_and_goes = comes_and_goes
        self._work: list[InFlight] = []
        self._gathered = False  # a collective has written what is there now
        self._warned = False
        self._block: MemoryBlock | None = None
        self._known: tuple[dict[int, int], int] | None = None
        self.bind()
        if comes_and_goes:
            device.deflate(self.block)

    def bind(self) -> None:
        """Takes memory for a new storage, and views of it."""
        self._block = self._device.allocate(self._layout.flat_bytes, f"parameters of {self._name}")
        self.tensor = self._block.view(self._layout.dtype)
        self.views = [self.tensor[slot.offset : slot.end].view(slot.view_shape) for slot in self._layout.slots]
        self.saved = SavedViews()
        self._own_refs = sys.getrefcount(self.saved)
        self._own_uses = self._count()
        if self._known is not None:
            self._known[0][self.key] = self._known[1]

    @property
    def block(self) -> MemoryBlock:
        assert self._block is not None
        return self._block

    @property
    def key(self) -> int:
        """Identifies the storage of now."""
        return int(self.tensor.untyped_storage()._cdata)

    def make_known(self, known: dict[int, int], index: int) -> None:
        """From now on ``known`` leads from the key of the storage, whichever it is, to ``index``."""
        self._known = known, index
        known[self.key] = index

    def fill(self) -> None:
        """Memory is there, with undefined content. BudgetError when there is none."""
        self._outwait()  # an interrupted fetch may still write
        if self._block is None:
            self.bind()
        elif self._comes_and_goes:
            self._device.inflate(self._block)

    def hold(self, work: InFlight) -> None:
        """Something is writing the buffer. See [Note: work in flight]."""
        self._work.append(work)
        self._gathered |= isinstance(work, Collective)

    def settled(self) -> None:
        """What was writing has ended, or what is queued from now on comes after it."""
        self._work.clear()

    def empty(self) -> None:
        """The memory goes back. See [Note: who else holds it]. The parameters show other tensors by now."""
        self._outwait()
        if not self._comes_and_goes or self._block is None:
            return
        if not self._is_ours() and not (self._gathered and self._becomes_ours()) and not self._was_garbage():
            self._leave()
            return
        self._gathered = False
        try:
            self._device.deflate(self._block)
        except RuntimeError:  # "not resizable": someone made a numpy array of it
            self._leave()

    @property
    def is_held(self) -> bool:
        """Whether autograd holds views of it, for a backward that may still come, or someone else does. The parameters show
        other tensors by now."""
        return sys.getrefcount(self.saved) > self._own_refs or not self._is_ours()

    def free(self) -> None:
        """The group has another one from now on. Whoever else holds the storage keeps it."""
        self._outwait()
        if self._known is not None:
            self._known[0].pop(self.key, None)
        block, self._block = self._block, None
        self.tensor, self.views = self.tensor.new_empty(0), []
        if block is not None:
            self._device.free(block)

    def _outwait(self) -> None:
        while self._work:
            with suppress(Exception):  # whoever asked for it is told
                self._work[-1].wait()
            self._work.pop()

    def _is_ours(self) -> bool:
        saved = sys.getrefcount(self.saved) - self._own_refs
        return _uses is None or self._count() <= self._own_uses + saved

    def _becomes_ours(self) -> bool:
        """See [Note: who else holds it]."""
        for _ in range(0 if self._warned else LOOKS):
            if self._is_ours():
                return True
            time.sleep(LOOK_S)
        return self._is_ours()

    def _was_garbage(self) -> bool:
        """See [Note: who else holds it]."""
        if self._warned or FlatBuffer.in_vain >= COLLECTIONS:
            return False
        gc.collect()
        ours = self._is_ours()
        FlatBuffer.in_vain = 0 if ours else FlatBuffer.in_vain + 1
        return ours

    def _count(self) -> int:
        return 0 if _uses is None else _uses(self.tensor.untyped_storage()._cdata)

    def _leave(self) -> None:
        """The storage is left to whoever else has it."""
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"a tensor that shares memory with the parameters of group {self._name} is kept by your code, or by its "
                "hooks on saved tensors: it keeps its values of now, and its memory on the device. Copy what you keep: "
                ".detach().clone()",
                RuntimeWarning,
                stacklevel=2,
            )
        self.free()
