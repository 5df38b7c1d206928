"""What autograd computes of a group's gradient on this rank, until the ranks add it up."""

import math
from collections.abc import Callable

import torch

from unwall.shards.group import Group
from unwall.shards.layout import Layout
from unwall.tiers.block import MemoryBlock
from unwall.tiers.tiers import Tiers

COPIED_AT_ONCE_BYTES = 4 << 20
"""Groups up to this size whose gradients stay on the device are filled by one copy of all of them: launches count there."""


class Accumulator:
    """This rank's own gradients of one group: those of the running pass in the flat buffer, in the dtype they travel in, and
    the sum of passes inside ``no_sync`` beside it, in fp32.

    Filling: the flat buffer has memory, from ``begin`` until ``keep_local`` or ``handed_over``. Only then is there a place to
    ``take`` a gradient to; anything else raises.
    """

    def __init__(self, group: Group, tiers: Tiers, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.arrived: set[int] = set()
        """Parameters whose gradient is in the flat buffer."""
        self._group = group
        self._tiers = tiers
        self.flat: MemoryBlock | None = None
        """The flat buffer, while it is filled."""
        self._typed: torch.Tensor | None = None
        """The flat buffer in the dtype of the gradients."""
        self._strides: dict[int, tuple[torch.Size | None, tuple[int, ...], int]] = {}
        """By slot: the shape of the parameter (None: it is empty, or not all there is), its strides, its beginning."""
        self.waits = False
        """Whether all gradients are copied at once."""
        self.waiting: list[tuple[int, torch.Tensor]] = []
        """What has arrived, by slot, of those that fill it as they are, but was not copied to its place yet."""
        self._outlines: tuple[list[int], list[torch.Tensor]] | None = None
        """What lies in the flat buffer, end to end: the slot (-1: a gap), and something of its shape."""
        self._local: MemoryBlock | None = None
        self._local_slots: set[int] = set()
        """Parameters that have a part in the local sum."""

    @property
    def filling(self) -> bool:
        return self.flat is not None

    @property
    def pending(self) -> set[int]:
        """Parameters with a gradient here."""
        return self.arrived | self._local_slots

    @property
    def flat_bytes(self) -> int:
        """The size of the flat buffer."""
        return self._group.layout.padded_numel * self.dtype.itemsize

    @property
    def local_bytes(self) -> int:
        """Device memory that ``keep_local`` takes."""
        return 0 if self._local is not None else self._group.layout.padded_numel * self._wide.itemsize

    def begin(self, flat: MemoryBlock | None) -> None:
        """Starts filling ``flat``, or new memory."""
        if self.flat is not None:
            raise RuntimeError(f"the gradients of group {self._group.name} are being filled already: end that first")
        self.flat = self._tiers.device.allocate(self.flat_bytes, self._label) if flat is None else flat
        self._typed = self.flat.view(self.dtype)
        self.waits = self._group.home.tier == "device" and self.flat_bytes <= COPIED_AT_ONCE_BYTES
        if self.waits:
            self._typed.zero_()  # one launch, where each gap would take one

    def take(self, slot: int, grad: torch.Tensor) -> None:
        """Copies (or adds) the slot's part of one parameter's gradient into the flat buffer."""
        flat = self._filled() if self._typed is None else self._typed
        known = self._strides.get(slot)
        if known is None:
            place = self._group.layout.slots[slot]
            shape = place.shape if place.whole and place.numel else None
            known = self._strides[slot] = shape, _strides(place.shape), place.offset
        shape, strides, offset = known
        fresh = slot not in self.arrived
        if fresh and self.waits and grad.shape == shape:
            self.waiting.append((slot, grad))
            self.arrived.add(slot)
            return
        if grad.shape == shape:
            target = flat.as_strided(shape, strides, flat.storage_offset() + offset)
        else:
            place = self._group.layout.slots[slot]
            grad = grad if place.whole else place.range_of(grad.reshape(-1))
            target = flat[place.offset : place.end].view(grad.shape)
        if fresh:
            target.copy_(grad)
            self.arrived.add(slot)
        else:
            self._copy_waiting()
            target.add_(grad)

    def _copy_waiting(self) -> None:
        if not self.waiting:
            return
        if self._outlines is None:
            self._outlines = _outlines(self._group.layout)
        slots, shapes = self._outlines
        with torch.no_grad():  # whoever ends a backward with create_graph=True may have it on, and gradients have a graph
            places = dict(zip(slots, _unflatten(self._filled(), shapes), strict=True))
            torch._foreach_copy_([places[slot] for slot, _ in self.waiting], [grad for _, grad in self.waiting])
        self.waiting.clear()

    def take_in(self, slot: int, write: Callable[[torch.Tensor, bool], None]) -> None:
        """The same for a slot whose gradient is written in its place. ``write`` gets that, and whether it holds nothing yet."""
        self._copy_waiting()
        place = self._group.layout.slots[slot]
        write(self._filled()[place.offset : place.end], slot not in self.arrived)
        self.arrived.add(slot)

    def keep_local(self) -> None:
        """The end of a pass inside ``no_sync``: what arrived is added to the local sum, and the flat buffer is freed."""
        flat = self._filled()
        self._copy_waiting()
        self._clear_rest(flat)
        if self._local is None:
            self._local = self._tiers.memory("device", flat.numel(), self._wide, self._label)
        self._local.view(self._wide).add_(flat)
        self._local_slots |= self.arrived
        self._free_flat()

    def complete(self) -> MemoryBlock:
        """All of this rank's gradients, local sum included, are in the flat buffer now. It stays here until ``handed_over``."""
        flat = self._filled()
        self._copy_waiting()
        self._clear_rest(flat)
        if self._local is not None:
            flat.copy_(self._local.view(self._wide).add_(flat))
            self.arrived |= self._local_slots
            self._free_local()
        assert self.flat is not None
        return self.flat

    def handed_over(self) -> None:
        """The flat buffer is somebody else's now."""
        self.flat = self._typed = None
        self.arrived.clear()

    def drop(self, slots: set[int]) -> None:
        """Forgets the gradients of some parameters."""
        self._copy_waiting()
        for slot in self.arrived & slots if self.waits else ():
            place = self._group.layout.slots[slot]
            self._filled()[place.offset : place.end].zero_()
        self.arrived -= slots
        for slot in self._local_slots & slots:
            assert self._local is not None
            place = self._group.layout.slots[slot]
            self._local.view(self._wide)[place.offset : place.end].zero_()
        self._local_slots -= slots
        if not self._local_slots:
            self._free_local()

    def clear(self) -> None:
        """Forgets everything."""
        if self.flat is not None:
            self._free_flat()
        self._free_local()

    @property
    def _wide(self) -> torch.dtype:
        return torch.promote_types(self.dtype, torch.float32)

    @property
    def _label(self) -> str:
        return f"gradients of {self._group.name}"

    def _filled(self) -> torch.Tensor:
        if self._typed is None:
            raise RuntimeError(f"the gradients of group {self._group.name} have no flat buffer: begin first")
        return self._typed

    def _clear_rest(self, flat: torch.Tensor) -> None:
        """Zeroes what no gradient was written to: missing parameters and padding."""
        if self.waits:
            return  # all of it was, at the beginning
        end = 0
        for index, slot in enumerate(self._group.layout.slots):
            if index in self.arrived:
                if end < slot.offset:
                    flat[end : slot.offset].zero_()
                end = slot.end
        if end < flat.numel():
            flat[end:].zero_()

    def _free_flat(self) -> None:
        assert self.flat is not None
        self._tiers.device.free(self.flat)
        self.flat = self._typed = None
        self.waiting.clear()
        self.arrived.clear()

    def _free_local(self) -> None:
        if self._local is not None:
            self._tiers.device.free(self._local)
            self._local = None
        self._local_slots.clear()


def _outlines(layout: Layout) -> tuple[list[int], list[torch.Tensor]]:
    slots: list[int] = []
    shapes: list[torch.Tensor] = []
    end = 0
    for index, slot in enumerate(layout.slots):
        if end < slot.offset:
            slots.append(-1)
            shapes.append(torch.empty(slot.offset - end, device="meta"))
        slots.append(index)
        shapes.append(torch.empty(slot.shape if slot.whole else (slot.numel,), device="meta"))
        end = slot.end
    return slots, shapes


_unflatten = torch._C._nn.unflatten_dense_tensors
"""Views of a flat tensor, end to end, in the shapes of others: all of them in one call."""


def _strides(shape: torch.Size) -> tuple[int, ...]:
    """Of a contiguous tensor."""
    return tuple(math.prod(shape[at + 1 :]) for at in range(len(shape)))
