"""Copies between any two tiers, each with a ticket and counted on its link."""

import threading
from contextlib import nullcontext
from types import TracebackType

import torch

from unwall.native.pool import WorkerPool
from unwall.tiers.block import Block, DiskBlock, MemoryBlock, Region
from unwall.tiers.device import DeviceTier
from unwall.tiers.disk import DiskTier
from unwall.tiers.host import HostTier
from unwall.tiers.ledger import TierName
from unwall.tiers.meter import DeviceClock, LinkMeter, Timeline
from unwall.tiers.ring import BounceRing
from unwall.tiers.sizes import ALIGNMENT
from unwall.tiers.stager import Stager
from unwall.tiers.ticket import EventTicket, Joined, Metered, Ticket

RING_SLOTS = 4
RING_SLOT_BYTES = 8 << 20
_TIERS: tuple[TierName, ...] = ("device", "host", "disk")
_NOTHING = nullcontext()
_is_profiled = torch.autograd._profiler_enabled  # type: ignore[attr-defined]
"""Whether a profiler of torch's is there. ``record_function`` takes 10 us also where there is none."""


class Links:
    """All ways between the tiers of one process. Each direction has its own stream or workers, so they run at once.

    Each direction between disk and device that is used costs ``ring_slots`` x ``ring_slot_bytes`` of the host tier.
    """

    def __init__(
        self,
        device: DeviceTier,
        host: HostTier,
        disk: DiskTier | None = None,
        *,
        ring_slots: int = RING_SLOTS,
        ring_slot_bytes: int = RING_SLOT_BYTES,
    ) -> None:
        self.device = device
        self.host = host
        self.disk = disk
        self._ring_shape = (ring_slots, ring_slot_bytes)
        self.timeline = Timeline()
        self.meters = {(a, b): LinkMeter(f"{a}>{b}", self.timeline) for a in _TIERS for b in _TIERS}
        self._on_accelerator = device.device.type != "cpu"
        self.clock = DeviceClock(device.device) if device.device.type == "cuda" else None
        self._lock = threading.Lock()
        self._pools: dict[tuple[TierName, TierName], WorkerPool] = {}
        self._streams: dict[tuple[TierName, TierName], torch.cuda.Stream] = {}
        self._stagers: dict[tuple[TierName, TierName], Stager] = {}

    def use_disk(self, disk: DiskTier | None, ring_slot_bytes: int) -> None:
        """Another disk, or none, from now on. Nothing is on its way to or from the one before."""
        with self._lock:
            stagers, self._stagers = self._stagers, {}
            self.disk, self._ring_shape = disk, (self._ring_shape[0], ring_slot_bytes)
        for stager in stagers.values():
            stager.close()

    def copy(self, source: Region | Block, target: Region | Block, label: str = "") -> Ticket:
        """Starts copying ``source`` to ``target`` (same size). Both may be freed: their memory lives until the copy has ended.

        Device work queued so far is waited for by the copy (on a stream, not by the caller). The caller orders uses of the
        target after the ticket.
        """
        source = Region.whole(source) if isinstance(source, Block) else source
        target = Region.whole(target) if isinstance(target, Block) else target
        self._check(source, target)
        ready = self._ready(source, target)
        ends = (source.block.tier, target.block.tier)
        label = label or source.block.label or target.block.label
        with torch.profiler.record_function(f"unwall {ends[0]}>{ends[1]} {label}") if _is_profiled() else _NOTHING:
            if "disk" not in ends or "host" in ends:
                return Metered(self._direct(source, target, ready, label), self.meters[ends], label)
            ticket = self._stager(*ends).copy(source, target, lambda a, b: self._direct(a, b, ready, label))
            slow: tuple[TierName, TierName] = ("disk", "host") if ends[0] == "disk" else ("host", "disk")
            return Metered(ticket, self.meters[slow], label)

    def pool(self, source: TierName, target: TierName) -> WorkerPool:
        """The workers that copy in this direction where there is no accelerator (one thread each)."""
        with self._lock:
            if (source, target) not in self._pools:
                self._pools[source, target] = WorkerPool(1)
            return self._pools[source, target]

    def stream(self, source: TierName, target: TierName) -> "torch.cuda.Stream":
        """The stream that copies in this direction on an accelerator."""
        with self._lock:
            if (source, target) not in self._streams:
                self._streams[source, target] = torch.cuda.Stream(self.device.device)
            return self._streams[source, target]

    @property
    def slots_in_use(self) -> int:
        """Bounce slots that hold bytes on their way between disk and device now."""
        return sum(stager.ring.in_use for stager in self._stagers.values())

    def close(self) -> None:
        """Finishes what is in flight and stops the workers."""
        for stager in self._stagers.values():
            stager.close()
        for pool in self._pools.values():
            pool.close()

    def __enter__(self) -> "Links":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _stager(self, source: TierName, target: TierName) -> Stager:
        with self._lock:
            if (source, target) not in self._stagers:
                ring = BounceRing(self.host, *self._ring_shape)
                ring.fill()  # here, not on the stager's thread, which knows no device and has no one to tell
                self._stagers[source, target] = Stager(f"{source}>{target}", ring)
            return self._stagers[source, target]

    def _check(self, source: Region, target: Region) -> None:
        if source.nbytes != target.nbytes:
            raise ValueError(
                f"copy of {source.nbytes} bytes from {source.block!r} into {target.nbytes} bytes of {target.block!r}"
            )
        if source.block is target.block and source.offset < target.end and target.offset < source.end:
            raise ValueError(f"bytes {source.offset} and {target.offset} of {source.block!r}: the ends of the copy overlap")
        on_disk = [end for end in (source, target) if end.block.tier == "disk"]
        for end in on_disk:
            if self.disk is None:
                raise RuntimeError("this process has no disk tier: give Plan(disk=...) a directory")
            if end.block.ledger is not self.disk.ledger:
                raise ValueError(f"{end.block!r} belongs to another disk tier than the one of these links")
        if on_disk:
            _check_sectors(source)
            _check_sectors(target)

    def _ready(self, source: Region, target: Region) -> "torch.cuda.Event | None":
        """What the device must have passed before the copy: taken here, because a staging thread knows other streams."""
        if not self._on_accelerator or "device" not in (source.block.tier, target.block.tier):
            return None
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self.device.device))
        return event

    def _direct(self, source: Region, target: Region, ready: "torch.cuda.Event | None", label: str) -> Ticket:
        """A copy in one hop: between memories, or between host and disk."""
        meter = self.meters[source.block.tier, target.block.tier]
        if isinstance(source.block, DiskBlock):
            assert self.disk is not None
            into = _memory(target)
            parts = self.disk.read(source.block, source.offset, into.data_ptr(), source.nbytes, keep=into)
        elif isinstance(target.block, DiskBlock):
            assert self.disk is not None
            out_of = _memory(source)
            parts = self.disk.write(target.block, target.offset, out_of.data_ptr(), source.nbytes, keep=out_of)
        else:
            ticket = self._memory_to_memory(source, target, ready, meter, label)
            meter.add(source.nbytes)
            return ticket
        meter.add(source.nbytes)
        for part in parts:
            meter.watch(part, label)
        return Joined(parts)

    def _memory_to_memory(
        self, source: Region, target: Region, ready: "torch.cuda.Event | None", meter: LinkMeter, label: str
    ) -> Ticket:
        ends = (source.block.tier, target.block.tier)
        origin, goal = _memory(source), _memory(target)
        if ready is None:
            ticket = self.pool(*ends).copy(goal.data_ptr(), origin.data_ptr(), source.nbytes, keep=(origin, goal))
            meter.watch(ticket, label)
            return ticket
        assert self.clock is not None
        stream = self.stream(*ends)
        stream.wait_event(ready)
        with torch.cuda.stream(stream):
            start, event = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record(stream)
            goal.copy_(origin, non_blocking=True)
            event.record(stream)
        meter.watch_events(start, event, label, self.clock)
        # The allocator must not hand this memory out again before the copy is through. Then the ticket need not keep it.
        for tensor in (origin, goal):
            if tensor.is_cuda:
                tensor.record_stream(stream)
        return EventTicket(event, keep=tuple(tensor for tensor in (origin, goal) if not tensor.is_cuda))


def _memory(region: Region) -> torch.Tensor:
    """The bytes of a region. As long as the tensor lives the memory does, even when the block is freed."""
    assert isinstance(region.block, MemoryBlock)
    if region.block.deflated:
        raise RuntimeError(f"{region.block!r} is deflated: inflate it before a copy")
    return region.block.data[region.offset : region.end]


def _check_sectors(end: Region) -> None:
    """The disk moves whole sectors from and to whole pages. An odd number of bytes is only possible at the end of a block,
    where padding follows. The device is not concerned: its bytes go through a slot."""
    if end.block.tier == "device":
        return
    if end.offset % ALIGNMENT:
        raise ValueError(f"byte {end.offset} of {end.block!r} cannot go to or from the disk: use a multiple of {ALIGNMENT}")
    if end.nbytes % ALIGNMENT and end.end != end.block.nbytes:
        raise ValueError(
            f"{end.nbytes} bytes in the middle of {end.block!r} cannot go to or from the disk: use a multiple of {ALIGNMENT}"
        )
