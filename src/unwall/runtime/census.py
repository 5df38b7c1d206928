"""Counts what autograd saves of each block of a model, in passes that are measured."""

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from unwall.native import interrupts
from unwall.runtime import transforms
from unwall.runtime.block_call import BEGUN
from unwall.schedule.activations import Measured


class Watch:
    """Times one block on the device's own clock, where it has one."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._seconds = 0.0
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def running(self) -> Iterator[None]:
        if self._cuda:
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            yield
            end.record()
            self._events.append((start, end))
            return
        begun = time.perf_counter()
        yield
        self._seconds += time.perf_counter() - begun

    def seconds(self) -> float:
        """Waits for the device."""
        for start, end in self._events:
            end.synchronize()
            self._seconds += float(start.elapsed_time(end)) / 1e3
        self._events.clear()
        return self._seconds


class Census:
    """Bytes and seconds of each block of one pass. ``stays`` says which tensors are no activations: views of parameters.

    A storage counts once, for the first block that saves it, however many nodes do. While a weak reference to it is held its
    address is no other's, so one that is dropped meanwhile (by a checkpoint) is not taken for another. What a checkpoint inside
    a block takes (a sequence tile's, or one of the model's own) is dropped whatever becomes of the block, and does not count.
    """

    def __init__(self, blocks: int, device: torch.device, stays: Callable[[torch.Tensor], bool]) -> None:
        self._device = device
        self._stays = stays
        self._saved: dict[int, int] = {}  # storages: address and weak reference
        self._inputs: dict[int, int] = {}
        self._block = -1
        self._own: Callable[[], Any] = lambda: None
        self.kept_bytes = [0] * blocks
        self.input_bytes = [0] * blocks
        self._watches = [Watch(device) for _ in range(blocks)]
        self.calls = 0

    @contextmanager
    def counting(self, block: int, inputs: "Iterable[tuple[torch.Tensor, int]]", own: Callable[[], Any]) -> Iterator[None]:
        """A block's forward runs. ``inputs``: each with the number of parts that it is kept in one of. ``own``: the ``pack`` of
        the checkpoint that we have put around the block, if it is recomputed (``BlockCall.taker``)."""
        for tensor, parts in inputs:
            if self._counts(tensor):
                self.input_bytes[block] += -(-_first_time(tensor.untyped_storage(), self._inputs) // parts)
        outer, self._block = self._block, block
        outer_own, self._own = self._own, own
        try:
            with self._watches[block].running():
                yield
            self.calls += 1
        finally:
            self._block, self._own = outer, outer_own

    def seen(self, value: Any, taker: Any) -> None:
        """Autograd saves something. ``taker``: the ``pack`` of the checkpoint that takes it, if one does."""
        if self._block < 0 or torch._C._current_graph_task_id() != -1 or not self._counts(value):
            return
        own = self._own()
        if own is BEGUN or (taker is not None and taker is not own):
            return
        self.kept_bytes[self._block] += _first_time(value.untyped_storage(), self._saved)

    def _counts(self, value: Any) -> bool:
        if not isinstance(value, torch.Tensor) or value.layout is not torch.strided or value.device != self._device:
            return False
        return not transforms.is_wrapped(value) and not self._stays(value)

    def take_back(self, block: int, kept_bytes: int) -> None:
        """A block's forward did not end: what it had saved is gone."""
        self.kept_bytes[block] = kept_bytes

    def forget(self) -> None:
        """The pass is over."""
        for known in (self._saved, self._inputs):
            while known:
                torch.UntypedStorage._free_weak_ref(known.popitem()[1])

    def read(self) -> list[Measured]:
        """Waits for the device."""
        return [
            Measured(kept, held, watch.seconds())
            for kept, held, watch in zip(self.kept_bytes, self.input_bytes, self._watches, strict=True)
        ]

    def __del__(self) -> None:
        with interrupts.finalizing:
            self.forget()


def _first_time(storage: torch.UntypedStorage, known: dict[int, int]) -> int:
    """Its bytes, or 0 where it was met before."""
    if storage._cdata in known:
        return 0
    known[storage._cdata] = storage._weak_ref()  # type: ignore[assignment]
    return storage.nbytes()
