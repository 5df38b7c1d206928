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

    Filling: the flat buffer is there, from ``begin`` until ``keep_local`` or ``handed_over``. Only then is there a place to
    ``take`` a gradient to; anything else raises. Where gradients wait to be copied at once it is only promised: counted, and
    without memory until it is known what fills it.
    """

    def __init__(self, group: Group, tiers: Tiers, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.arrived: set[int] = set()
        """Parameters whose gradient is in the flat buffer, or waits to be."""
        self._group = group
        self._tiers = tiers
        self.flat: MemoryBlock | None = None
        """The flat buffer, while it is filled."""
        self._typed: torch.Tensor | None = None
        """The flat buffer in the dtype of the gradients. None: it is only promised."""
        self._strides: dict[int, tuple[torch.Size | None, tuple[int, ...], int]] = {}
        """By slot: the shape of the parameter (None: it is empty, or not all there is), its strides, its beginning."""
        self.waits = False
        """Whether all gradients are copied at once."""
        self.waiting: list[tuple[int, torch.Tensor]] = []
        """What has arrived, by slot, of those that fill it as they are, but was not copied to its place yet."""
        self._laid_out: tuple[tuple[list[int], list[torch.Tensor]], list[torch.Tensor | None] | None] | None = None
        """See ``_lay_out``."""
        self._local: MemoryBlock | None = None
        self.local_slots: set[int] = set()
        """Parameters that have a part in the local sum."""

    @property
    def filling(self) -> bool:
        return self.flat is not None

    @property
    def pending(self) -> set[int]:
        """Parameters with a gradient here."""
        return self.arrived | self.local_slots

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
        nbytes = self.flat_bytes
        self.waits = self._group.home.tier == "device" and nbytes <= COPIED_AT_ONCE_BYTES
        if flat is None and self.waits:
            self.flat = self._tiers.device.promise(nbytes, self._label)  # memory comes when it is known what fills it
            return
        self.flat = self._tiers.device.allocate(nbytes, self._label) if flat is None else flat
        self._typed = self.flat.view(self.dtype)
        if self.waits:
            self._typed.zero_()  # one launch, where each gap would take one

    def take(self, slot: int, grad: torch.Tensor) -> None:
        """Copies (or adds) the slot's part of one parameter's gradient into the flat buffer."""
        if self.flat is None:
            self._filled()
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
        if shape is None and not grad.numel():  # a parameter without elements
            self.arrived.add(slot)
            return
        flat = self._filled() if self._typed is None else self._typed
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

    def _join(self) -> bool:
        """Makes the flat buffer of what waits, where that is all there is to fill it: it is read and written once."""
        if self._local is not None or torch.is_grad_enabled():  # somebody may want a graph of the gradients
            return False
        outlines, gaps = self._lay_out()
        if gaps is None:
            return False
        arrived, parts = dict(self.waiting), []
        for slot, gap in zip(outlines[0], gaps, strict=True):
            part = arrived.get(slot) if gap is None else gap
            if part is None:
                return False
            parts.append(part if part.dtype is self.dtype else part.to(self.dtype))
        assert self.flat is not None
        self._tiers.device.keep(self.flat, lambda: _flatten(parts) if len(parts) > 1 else parts[0].reshape(-1).clone())
        self._typed = self.flat.view(self.dtype)
        self.waiting.clear()
        return True

    def _lay_out(self) -> tuple[tuple[list[int], list[torch.Tensor]], list[torch.Tensor | None] | None]:
        """What lies in the flat buffer, end to end: the slot (-1: a gap), and something of its shape; and what lies in each gap
        (None for a slot, and instead of all of it where they are too large to be kept)."""
        if self._laid_out is None:
            outlines = _outlines(self._group.layout)
            self._laid_out = outlines, _gaps(*outlines, self.dtype, self._tiers.device.device)
        return self._laid_out

    def _copy_waiting(self) -> None:
        if not self.waiting:
            return
        slots, shapes = self._lay_out()[0]
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
        self.local_slots |= self.arrived
        self._free_flat()

    def complete(self) -> MemoryBlock:
        """All of this rank's gradients, local sum included, are in the flat buffer now. It stays here until ``handed_over``."""
        if self._typed is None and self.flat is not None and self._join():
            return self.flat
        flat = self._filled()
        self._copy_waiting()
        self._clear_rest(flat)
        if self._local is not None:
            flat.copy_(self._local.view(self._wide).add_(flat))
            self.arrived |= self.local_slots
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
        for slot in self.local_slots & slots:
            assert self._local is not None
            place = self._group.layout.slots[slot]
            self._local.view(self._wide)[place.offset : place.end].zero_()
        self.local_slots -= slots
        if not self.local_slots:
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
        if self.flat is None:
            raise RuntimeError(f"the gradients of group {self._group.name} have no flat buffer: begin first")
        if self._typed is None:
            device = self._tiers.device
            device.keep(self.flat, lambda: torch.zeros(self.flat_bytes, dtype=torch.uint8, device=device.device))
            self._typed = self.flat.view(self.dtype)
        return self._typed

    def _clear_rest(self, flat: torch.Tensor) -> None:
        """Zeroes what no gradient was written to: missing parameters and padding."""
        if self.waits:
            return  # all of it was, when it got its memory
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
        self.local_slots.clear()


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
    if end < layout.padded_numel:
        slots.append(-1)
        shapes.append(torch.empty(layout.padded_numel - end, device="meta"))
    return slots, shapes


def _gaps(
    slots: list[int], shapes: list[torch.Tensor], dtype: torch.dtype, device: torch.device
) -> list[torch.Tensor | None] | None:
    """See ``Accumulator._lay_out``. An empty slot is a gap without elements."""
    largest = max((shape.numel() for slot, shape in zip(slots, shapes, strict=True) if slot < 0), default=0)
    if largest * dtype.itemsize > _LARGEST_GAP_BYTES:
        return None
    zeros = torch.zeros(largest, dtype=dtype, device=device)
    pairs = zip(slots, shapes, strict=True)
    return [zeros[: shape.numel()] if slot < 0 or not shape.numel() else None for slot, shape in pairs]


_LARGEST_GAP_BYTES = 64 << 10
_flatten = torch._C._nn.flatten_dense_tensors
"""A flat tensor of others, end to end."""
_unflatten = torch._C._nn.unflatten_dense_tensors
"""Views of a flat tensor, end to end, in the shapes of others: all of them in one call."""


def _strides(shape: torch.Size) -> tuple[int, ...]:
    """Of a contiguous tensor."""
    return tuple(math.prod(shape[at + 1 :]) for at in range(len(shape)))
