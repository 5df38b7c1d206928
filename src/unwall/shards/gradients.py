"""A group's gradient on its way: from autograd into the flat buffer, over the ranks, into the owned run.

Life cycle of one backward pass: ``take`` each parameter's gradient as autograd finishes it, ``begin_reduce`` when all are in,
``finish_reduce`` before anyone looks. Several passes before a step add up in fp32.
"""

from contextlib import suppress

import torch

from unwall.native.library import DiskError
from unwall.shards.collectives import Collective, Ranks
from unwall.shards.group import Group
from unwall.shards.landing import LandingPlace, square_sum
from unwall.shards.store import Store
from unwall.tiers.block import MemoryBlock
from unwall.tiers.disk import named
from unwall.tiers.ticket import Ticket, hold_back
from unwall.tiers.tiers import Tiers


class Gradient:
    """The gradient of one group.

    ``keep_flat``: gradients are not cut (stages 0 and 1): the flat buffer stays, and the sum goes back into it.
    ``everywhere`` (stage 0): every rank ends with the whole sum, so that every rank updates everything.
    """

    def __init__(
        self, group: Group, tiers: Tiers, ranks: Ranks, dtype: torch.dtype, *, keep_flat: bool, everywhere: bool
    ) -> None:
        self.group = group
        self.dtype = dtype
        """What it travels over the ranks in."""
        self.passes = 0
        """Reductions since the last step."""
        self.serial = 0
        """Counts reductions: says whether a gradient is still the one that was seen before."""
        self.arrived: set[int] = set()
        """Parameters whose gradient is in the flat buffer and not yet reduced."""
        self.present: set[int] = set()
        """Parameters that have a gradient on some rank, reduced, since the last step."""
        self.value: torch.Tensor | None = None
        """The average over ranks of the owned run, in memory. None: no gradient, or it is on disk."""
        self.stored: Store | None = None
        """The same on disk."""
        self.square_sum: torch.Tensor | None = None
        """Sum of squares of this rank's part, measured while it passed. None: not measured, or not valid any more."""
        self._tiers = tiers
        self._device = tiers.device
        self._local_block: MemoryBlock | None = None  # fp32: passes inside no_sync
        self._local_slots: set[int] = set()
        self._ranks = ranks
        self._keep_flat = keep_flat
        self._everywhere = everywhere
        self._flat_block: MemoryBlock | None = None
        self._value_block: MemoryBlock | None = None  # None while `value` lies in the flat buffer
        self._incoming: MemoryBlock | None = None
        self._sent: MemoryBlock | None = None
        self._work: Collective | None = None
        self._leaves = group.home.tier == "host"
        self._place = LandingPlace(group, tiers, dtype)
        self._lost: Exception | None = None
        self._forgotten: set[int] = set()  # parameters whose gradients are still in the value, but not wanted any more
        self._landing: Ticket | None = None
        self._leaving: MemoryBlock | None = None  # what the landing copies from

    @property
    def held(self) -> bool:
        """Whether there is a reduced gradient."""
        return self.value is not None or self.stored is not None

    def check(self) -> None:
        """Raises where the gradient should be here, but its tier did not take it."""
        if self._lost is None:
            return
        advice = "call zero_grad() and run the forward and backward of this step again"
        if isinstance(self._lost, DiskError):
            error: Exception = named(self._lost, f"keeping the gradient of group {self.group.name}")
            error.add_note(advice)
        else:
            error = RuntimeError(f"the gradient of group {self.group.name} could not be kept ({self._lost}): {advice}")
        raise error from self._lost

    @property
    def pending(self) -> set[int]:
        """Parameters with a gradient on this rank that was not reduced yet."""
        return self.arrived | self._local_slots

    @property
    def local_bytes(self) -> int:
        """Device memory that ``keep_local`` needs."""
        item = torch.promote_types(self.dtype, torch.float32).itemsize
        return 0 if self._local_block is not None else self.group.layout.padded_numel * item

    @property
    def flat_bytes(self) -> int:
        """Device memory that a pass over this group's backward takes: the flat buffer and, over ranks, what it becomes."""
        layout = self.group.layout
        whole = layout.padded_numel * self.dtype.itemsize
        flat = 0 if self._flat_block is not None else whole
        if self.value is not None and self.value.dtype.itemsize < 4 and not self._leaves:
            flat += self.group.own_numel * 4  # a second pass adds up in fp32
        if self._ranks.size == 1:
            return flat
        return flat + layout.shard_numel * self.dtype.itemsize + (whole if self._everywhere else 0)

    def take(self, slot: int, grad: torch.Tensor) -> None:
        """Copies (or adds) one parameter's gradient into the flat buffer."""
        flat = self._flat_for_writing()
        place = self.group.layout.slots[slot]
        target = flat[place.offset : place.end].view(place.shape)
        if slot in self.arrived:
            target.add_(grad)
        else:
            target.copy_(grad)
        self.arrived.add(slot)

    def keep_local(self) -> None:
        """The end of a pass inside ``no_sync``: what arrived is added to this rank's own sum, in fp32."""
        flat = self._flat_for_writing()
        self._clear_rest(flat)
        dtype = torch.promote_types(self.dtype, torch.float32)
        if self._local_block is None:
            self._local_block = self._tiers.memory("device", flat.numel(), dtype, f"gradients of {self.group.name}")
        self._local_block.view(dtype).add_(flat)
        self._local_slots |= self.arrived
        self.arrived.clear()
        self._release_flat()

    def begin_reduce(self, present: set[int], contribute: bool = True) -> None:
        """Starts the sum over ranks.

        ``present``: parameters with a gradient on any rank. A rank that only serves another's wish does not ``contribute``:
        it adds zeros and keeps what arrived for its own turn.
        """
        self.finish_reduce()
        self._clear_forgotten()
        self.present |= present
        self.passes += 1
        self.serial += 1
        if contribute:
            flat = self._flat_for_writing()
            self._clear_rest(flat)
            if self._local_block is not None:
                local = self._local_block.view(torch.promote_types(self.dtype, torch.float32))
                flat.copy_(local.add_(flat))
                self._forget_local()
            self.arrived.clear()
        if self._ranks.size == 1:
            self._incoming, self._flat_block = self._flat_block, None
            self._begin_landing()
            return
        layout = self.group.layout
        if contribute:
            assert self._flat_block is not None
            self._sent = self._flat_block
        else:
            self._sent = self._allocate(layout.padded_numel)
            self._sent.data.zero_()
        sent = self._sent.view(self.dtype)
        if self.dtype is torch.float16:
            sent.div_(self._ranks.size)  # before the sum: fp16 overflows early
        self._incoming = self._allocate(layout.shard_numel)
        self._work = self._ranks.reduce_scatter(self._incoming.view(self.dtype), sent)
        if self._everywhere:  # here, not in finish_reduce: every rank must call collectives in the same order
            self._await_sum()
            part, self._incoming = self._incoming, self._allocate(layout.padded_numel)
            self._work = self._ranks.all_gather(self._incoming.view(self.dtype), part.view(self.dtype))
            self._device.free(part)

    def finish_reduce(self) -> None:
        """Waits for the sum and adds it to what earlier passes left."""
        if self._incoming is None:
            return
        if self._work is not None and not self._everywhere:
            self._await_sum()
        elif self._work is not None:
            self._work.wait()
            self._work = None
        self._begin_landing()
        incoming, self._incoming = self._incoming, None
        if self._sent is not None:
            if self._sent is not self._flat_block:
                self._device.free(self._sent)
            elif not self._keep_flat or self._leaves:
                self._release_flat()
            self._sent = None
        if self._leaves:
            try:
                self._finish_landing(incoming)
            except Exception as error:
                self._lost = error
                if isinstance(error, DiskError):
                    self.check()
                raise
            finally:
                self._leaving = None
                self._device.free(incoming)
            return
        if self.value is not None:
            self._widen()
            self.value.add_(incoming.view(self.dtype))
            self._device.free(incoming)
        elif self._keep_flat and self._flat_block is not None and not self.arrived:
            start = self.group.own_start
            self.value = self._flat_block.view(self.dtype)[start : start + self.group.own_numel]
            self.value.copy_(incoming.view(self.dtype))
            self._device.free(incoming)
        else:
            self._value_block, self.value = incoming, incoming.view(self.dtype)

    def clear(self) -> None:
        """Forgets every gradient (``zero_grad``, or after the step)."""
        self._discard_incoming()
        self.arrived.clear()
        self.present.clear()
        self._forgotten.clear()
        self.passes = 0
        self.value = self.stored = self.square_sum = self._landing = self._lost = None
        if self._value_block is not None and not self._place.is_memory(self._value_block):
            self._tiers.free(self._value_block)
        self._value_block = None
        if self._flat_block is not None:
            self._release_flat()
        self._forget_local()

    def _discard_incoming(self) -> None:
        """What is on its way is not wanted any more. The ranks' exchange runs to its end; nothing lands."""
        if self._incoming is None:
            return
        if self._work is not None:
            self._work.wait()
            self._work = None
        if self._landing is not None and self._leaving is not None:
            with suppress(Exception):
                self._landing.wait()  # it reads what is freed now
        if self._sent is not None and self._sent is not self._flat_block:
            self._device.free(self._sent)
        self._device.free(self._incoming)
        self._incoming = self._sent = self._leaving = None

    def drop_pending(self, slots: set[int]) -> None:
        """Forgets gradients of some parameters that were not reduced yet."""
        self.arrived -= slots
        if self._local_slots & slots:
            assert self._local_block is not None
            local = self._local_block.view(torch.promote_types(self.dtype, torch.float32))
            for slot in self._local_slots & slots:
                place = self.group.layout.slots[slot]
                local[place.offset : place.end].zero_()
            self._local_slots -= slots
            if not self._local_slots:
                self._forget_local()

    def _forget_local(self) -> None:
        if self._local_block is not None:
            self._device.free(self._local_block)
            self._local_block = None
        self._local_slots.clear()

    def _await_sum(self) -> None:
        assert self._work is not None
        assert self._incoming is not None
        self._work.wait()
        self._work = None
        if self.dtype is not torch.float16:
            self._incoming.view(self.dtype).div_(self._ranks.size)

    def _begin_landing(self) -> None:
        """Host or disk: the gradient leaves for the tier where it will be used; its square is summed before it goes."""
        if not self._leaves or self._leaving is self._incoming:
            return
        assert self._incoming is not None
        if self.stored is not None:
            self._leaving = self._incoming
            return  # adds up when it is finished
        if self.value is not None:
            self._widen()  # what landed before must not be overwritten
        if self._place.on_disk:
            self.group.staging.close()
        arriving = self._incoming.view(self.dtype)
        if arriving.is_cuda or self._place.on_disk:
            self.square_sum = square_sum(arriving, self.group, self._ranks) if self.value is None else None
        target = self._place.store().block if self._place.on_disk else self._place.memory()
        self._landing = self._tiers.links.copy(self._incoming, target, self.group.name)
        self._leaving = self._incoming

    def _finish_landing(self, incoming: MemoryBlock) -> None:
        if self._place.on_disk:
            before, self.stored = self.stored, None
            if before is None:
                self.await_landing()  # a copy to disk reads its source to the end
                self.stored = self._place.store()
            else:
                self.stored, self.square_sum = self._place.add(before, incoming.view(self.dtype), self._ranks)
            return
        assert self._landing is not None
        landed = self._place.memory()
        if self.value is None:
            self._value_block, self.value = landed, landed.view(self.dtype)
        else:
            self.await_landing()
            self.value.add_(landed.view(self.dtype))

    def read(self) -> torch.Tensor:
        """The reduced gradient as a tensor, wherever it is. Not to be changed."""
        self.check()
        self._clear_forgotten()
        self.await_landing()
        if self.stored is not None:
            return self.stored.tensor(write=False)
        assert self.value is not None
        return self.value

    def forget(self, slots: set[int]) -> None:
        """Takes out the gradients of some parameters: at once for whoever asks, in memory when the others' are read or added
        to. An update may be reading them now."""
        if self.held:
            self.square_sum = None
            self._forgotten |= slots

    def _clear_forgotten(self) -> None:
        if not self._forgotten or not self.held:
            return
        self.await_landing()
        self.group.finish_update()
        value = self.value if self.stored is None else self.stored.tensor()
        assert value is not None
        for segment in self.group.owned_segments():
            if segment.slot in self._forgotten:
                value[segment.shard_start : segment.shard_start + segment.numel].zero_()
        self.group.staging.close()
        self._forgotten.clear()

    @property
    def landing(self) -> Ticket | None:
        """Host: the copy that brings the value. Whoever reads the value waits for it first."""
        return self._landing

    def await_departure(self) -> None:
        """Waits until the gradient has left the device, and its memory there is free."""
        if self._landing is not None:
            hold_back(self._landing, self._device.device)

    def await_landing(self) -> None:
        if self._landing is not None:
            self._landing.wait()
            self._landing = None

    def _widen(self) -> None:
        """Moves the value into fp32 memory of its own, to add further passes to."""
        assert self.value is not None
        self.await_landing()
        self.square_sum = None
        kept = self._value_block is not None and not self._place.is_memory(self._value_block)
        if kept and self.value.dtype in (torch.float32, torch.float64):
            return
        dtype = torch.promote_types(self.value.dtype, torch.float32)
        wide = self._tiers.memory(self.group.home.tier, self.value.numel(), dtype, f"gradient shard of {self.group.name}")
        wide.view(dtype).copy_(self.value)
        if kept:
            assert self._value_block is not None
            self._tiers.free(self._value_block)
        self._value_block, self.value = wide, wide.view(dtype)

    def _flat_for_writing(self) -> torch.Tensor:
        self.finish_reduce()  # the flat buffer may still be on its way
        if self.value is not None and self._value_block is None:
            self._widen()  # the value lies in the flat buffer
        if self._flat_block is None:
            self._flat_block = self._allocate(self.group.layout.padded_numel)
        return self._flat_block.view(self.dtype)

    def _clear_rest(self, flat: torch.Tensor) -> None:
        """Zeroes what no gradient was written to: missing parameters and padding."""
        end = 0
        for index, slot in enumerate(self.group.layout.slots):
            if index in self.arrived:
                if end < slot.offset:
                    flat[end : slot.offset].zero_()
                end = slot.end
        if end < flat.numel():
            flat[end:].zero_()

    def _allocate(self, numel: int) -> MemoryBlock:
        return self._device.allocate(numel * self.dtype.itemsize, f"gradients of {self.group.name}")

    def _release_flat(self) -> None:
        assert self._flat_block is not None
        self._device.free(self._flat_block)
        self._flat_block = None
