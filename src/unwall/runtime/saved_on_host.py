"""Activations that wait for backward in host memory.

[Note: there and back]
A layer of the saved tensors (see [Note: layers] in saved.py). What autograd saves, storage by storage, is copied to page-locked
host memory on a stream of its own while forward goes on. The device's memory is held until the copy has ended: at most
``IN_FLIGHT_BYTES`` of it, then the compute stream (not the caller) waits for the oldest copy. In backward the storage that was
saved last is needed first, so the ones before it are on their way while it is used, ``AHEAD_BYTES`` of them. What is still on
the device when it is needed does not come back: it never left.

A storage that several nodes save (the input of three projections, the parts of a packed one) moves once, and comes back once:
it stays until each of them has used it. One that nobody comes for (a graph that is dropped) must not give its memory back while
the copy still writes to it. A tensor that is changed in place while its copy is under way would be saved in part before and in
part after the change: that is an error in backward, as it is in plain PyTorch.
"""

import threading
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch

from unwall.runtime.moved import Done, Leaving, Moved, Shelf
from unwall.tiers.device import DeviceTier
from unwall.tiers.host import HostBlock, HostTier
from unwall.tiers.links import Links

MIN_BYTES = 1 << 20
"""Smaller storages stay: many small copies would cost more than they free."""
MOST_PARTS = 8
"""A storage moves for a tensor that is so small a part of it at least. It stays on the device for any part that stays (one of
the three of a packed projection); but all of it goes along with one that moves."""
IN_FLIGHT_BYTES = 1 << 30
AHEAD_BYTES = 1 << 30


class SavedView:
    """What autograd keeps: a tensor of a storage that moved."""

    __slots__ = ("dtype", "moved", "offset", "shape", "stride")

    def __init__(self, moved: Moved, tensor: torch.Tensor) -> None:
        self.moved = moved
        self.dtype, self.shape, self.stride, self.offset = tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset()


class SavedOnHost:
    """The layer. ``stays`` says which tensors are no activations: views of parameters. See [Note: there and back]."""

    def __init__(self, links: Links, host: HostTier, device: DeviceTier, stays: Callable[[torch.Tensor], bool]) -> None:
        self._links = links
        self._device, self._arena = device.device, device.inputs_arena
        self._stays = stays
        self._min_bytes, self._in_flight_bytes, self._ahead_bytes = MIN_BYTES, IN_FLIGHT_BYTES, AHEAD_BYTES
        self._shelf = Shelf(host)
        self._streams: tuple[torch.cuda.Stream, torch.cuda.Stream] | None = None
        self._lock = threading.RLock()
        self._known: weakref.WeakValueDictionary[int, Moved] = weakref.WeakValueDictionary()
        self._by_number: weakref.WeakValueDictionary[int, Moved] = weakref.WeakValueDictionary()
        self._leaving: deque[tuple[Leaving, weakref.ref[Moved]]] = deque()
        self._leaving_bytes = 0
        self._count = 0
        self.active = True
        """Whether what is saved now moves."""

    @staticmethod
    def flight_of(room_bytes: int) -> int:
        """What is on its way may take so much of the device, of ``room_bytes`` there."""
        return min(max(IN_FLIGHT_BYTES, AHEAD_BYTES), max(0, room_bytes // 16))

    def bound(self, room_bytes: int, host_bytes: int) -> None:
        """Of so much room on the device what is on its way may take a small part. On the host: ``host_bytes``."""
        self._shelf.most_bytes = host_bytes
        self._in_flight_bytes = self._ahead_bytes = self.flight_of(room_bytes)

    # -- the layer ----------------------------------------------------------------------------------------------------

    def pack(self, value: Any, /) -> Any:
        if not self.active:
            return value
        recomputed = torch._C._current_graph_task_id() != -1  # backward uses it at once
        if recomputed or not isinstance(value, torch.Tensor) or not self._moves(value):
            return value
        with self._lock:
            moved = self._find(value) or self._send(value)
            if moved is None:
                return value
            moved.uses += 1
        return SavedView(moved, value)

    def unpack(self, packed: Any, /) -> Any:
        if not isinstance(packed, SavedView):
            return packed
        moved = packed.moved
        with self._lock:
            storage = self._storage_of(moved)
            self._fetch_ahead(moved.number)
        tensor = torch.empty(0, dtype=packed.dtype, device=self._device)
        return tensor.set_(storage, packed.offset, packed.shape, packed.stride)

    # -- to the host --------------------------------------------------------------------------------------------------

    def _moves(self, tensor: torch.Tensor) -> bool:
        if tensor.layout is not torch.strided or tensor.device != self._device or type(tensor) not in _PLAIN:
            return False
        nbytes = tensor.untyped_storage().nbytes()
        if nbytes < self._min_bytes or MOST_PARTS * tensor.nbytes < nbytes or tensor.is_conj() or tensor.is_neg():
            return False  # a view of bytes would lose that it is to be conjugated or negated
        return not tensor.is_inference() and not self._stays(tensor)

    def _find(self, tensor: torch.Tensor) -> Moved | None:
        moved = self._known.get(tensor.untyped_storage()._cdata)
        return moved if moved is not None and moved.is_of(tensor) else None

    def _send(self, tensor: torch.Tensor) -> Moved | None:
        storage = tensor.untyped_storage()
        taken = self._take(storage.nbytes())
        if taken is None:
            return None  # no room on the host: it stays
        block, free = taken
        self._count += 1
        moved = Moved(self._shelf, block, tensor, self._count)
        leaving = moved.leaving
        leaving.done = self._copy(_bytes_of(storage), block.data, outward=True, after=free)
        self._known[storage._cdata] = self._by_number[moved.number] = moved
        self._leaving.append((leaving, weakref.ref(moved)))
        self._leaving_bytes += leaving.nbytes
        self._let_go()
        self._sent(moved)
        return moved

    def _sent(self, moved: Moved) -> None:
        """It is on its way to the host."""

    def _take(self, nbytes: int) -> "tuple[HostBlock, Done] | None":
        return self._shelf.take(nbytes)

    def _let_go(self) -> None:
        """Gives up the device's memory of what has left, and of the oldest where too much is on its way."""
        while self._leaving:
            leaving, found = self._leaving[0]
            ended = leaving.done is not None and leaving.done.query()
            if not ended and self._leaving_bytes <= self._in_flight_bytes:
                return
            if not ended and leaving.done is not None:
                torch.cuda.current_stream(self._device).wait_event(leaving.done)
            self._leaving.popleft()
            self._leaving_bytes -= leaving.nbytes
            moved = found()
            if moved is not None:
                moved.spoiled = leaving.changed()
            leaving.tensor = None

    # -- back ---------------------------------------------------------------------------------------------------------

    def _storage_of(self, moved: Moved) -> torch.UntypedStorage:
        """The storage on the device, for the stream that computes now."""
        if moved.spoiled or moved.leaving.changed():
            raise RuntimeError(
                "backward needs a tensor as it was in forward, but it has been modified since by an inplace operation: "
                "do it out of place, or use Plan(activations='keep')"
            )
        moved.uses -= 1
        if moved.leaving.tensor is not None:
            return moved.leaving.tensor.untyped_storage()
        self._fetch(moved)
        storage = moved.back
        assert storage is not None
        if moved.uses <= 0:
            moved.back = None  # the last one holds it; a second backward fetches it again
        if moved.arrived is not None:
            torch.cuda.current_stream(self._device).wait_event(moved.arrived)
        return storage

    def _fetch_ahead(self, number: int) -> None:
        """What was saved before is needed next. Where the device has no room for it now, it comes when it is needed."""
        ahead = 0
        for earlier in range(number - 1, 0, -1):
            moved = self._by_number.get(earlier)
            if moved is None:
                return
            if moved.uses <= 0:  # all have had it
                continue
            ahead += moved.nbytes
            if ahead > self._ahead_bytes:
                return
            if moved.leaving.tensor is None and not self._fetches(moved):
                return

    def _fetches(self, moved: Moved) -> bool:
        try:
            self._fetch(moved)
        except torch.OutOfMemoryError:
            return False
        return True

    def _fetch(self, moved: Moved) -> None:
        if moved.back is None:
            assert moved.block is not None
            with nullcontext() if self._arena is None else self._arena.taking():
                target = torch.empty(moved.nbytes, dtype=torch.uint8, device=self._device)
            moved.stream = torch.cuda.current_stream(self._device) if target.is_cuda else None
            moved.arrived = self._copy(moved.block.data, target, outward=False, after=moved.leaving.done)
            moved.back = target.untyped_storage()

    # -- copies -------------------------------------------------------------------------------------------------------

    def _copy(self, source: torch.Tensor, target: torch.Tensor, *, outward: bool, after: Done) -> Done:
        """Copies, on a stream of its own where there is an accelerator."""
        meter = self._links.meters[("device", "host") if outward else ("host", "device")]
        meter.add(source.nbytes)
        if self._device.type != "cuda":
            target.copy_(source)
            return None
        assert self._links.clock is not None
        if self._streams is None:
            self._streams = torch.cuda.Stream(self._device), torch.cuda.Stream(self._device)
        stream = self._streams[0 if outward else 1]
        # What computes now may still write the source, or read what was in the target's memory before.
        stream.wait_stream(torch.cuda.current_stream(self._device))
        if after is not None:
            stream.wait_event(after)
        with torch.cuda.stream(stream):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record(stream)
            target.copy_(source, non_blocking=True)
            end.record(stream)
        meter.watch_events(start, end, "activations", self._links.clock)
        return end


_PLAIN = (torch.Tensor, torch.nn.Parameter)


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
