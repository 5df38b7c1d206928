"""Counts what crosses a link between two tiers, how long the link was busy, and how long anyone waited for it."""

import threading
import time
from collections import defaultdict, deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from unwall.native.ticket import NativeTicket
from unwall.tiers.lane import LaneSpan


@dataclass(frozen=True, kw_only=True)
class LinkStats:
    """What a link did since the last reset."""

    moved_bytes: int
    """Bytes of all copies that were submitted."""
    copies: int
    """How many copies that were."""
    busy_seconds: float
    """Time in which at least one copy was under way."""
    stall_seconds: float
    """Time a caller was blocked at the point of use, waiting for this link."""
    stalls: dict[str, float]
    """The same by label (the group that was waited for)."""


class Timeline:
    """Keeps every piece of work that the meters see, while it is switched on."""

    def __init__(self) -> None:
        self.spans: list[LaneSpan] | None = None

    def add(self, lane: str, label: str, start: float, end: float) -> None:
        if self.spans is not None:
            self.spans.append(LaneSpan(lane, label, start, end))


class DeviceClock:
    """Device events in seconds of the host's monotonic clock."""

    def __init__(self, device: torch.device) -> None:
        self._base = torch.cuda.Event(enable_timing=True)
        self._base.record(torch.cuda.current_stream(device))
        self._base.synchronize()
        self._seconds = time.monotonic()

    def seconds(self, event: "torch.cuda.Event") -> float:
        return self._seconds + float(self._base.elapsed_time(event)) / 1e3


class LinkMeter:
    """The counters of one link (or of one kind of work). Safe to use from several threads."""

    def __init__(self, name: str, timeline: Timeline | None = None) -> None:
        self.name = name
        self._timeline = Timeline() if timeline is None else timeline
        self._lock = threading.RLock()  # a ticket's finaliser may report at any moment, also inside one of these methods
        self._events: deque[tuple[torch.cuda.Event, torch.cuda.Event, str, DeviceClock]] = deque()
        self.reset()

    def reset(self) -> None:
        with self._lock:
            self._moved_bytes = 0
            self._copies = 0
            self._busy_seconds = 0.0
            self._busy_until = 0.0
            self._events.clear()
            self._stalls: defaultdict[str, float] = defaultdict(float)

    def add(self, nbytes: int) -> None:
        with self._lock:
            self._moved_bytes += nbytes
            self._copies += 1

    def busy(self, label: str, start: float, end: float) -> None:
        """Work ran from ``start`` to ``end`` (monotonic seconds). What overlaps earlier work counts once."""
        with self._lock:
            self._busy_seconds += max(0.0, end - max(start, self._busy_until))
            self._busy_until = max(self._busy_until, end)
            self._timeline.add(self.name, label, start, end)

    def watch(self, ticket: NativeTicket, label: str) -> None:
        """Counts native work as busy time when it has ended."""
        ticket.observe(lambda start, end: self.busy(label, start, end))

    def watch_events(self, start: "torch.cuda.Event", end: "torch.cuda.Event", label: str, clock: DeviceClock) -> None:
        """The same for work between two timing events of a stream."""
        with self._lock:
            self._events.append((start, end, label, clock))
        self._collect()

    def _collect(self) -> None:
        with self._lock:
            while self._events and self._events[0][1].query():
                start, end, label, clock = self._events.popleft()
                self.busy(label, clock.seconds(start), clock.seconds(end))

    @contextmanager
    def stalled(self, label: str) -> Iterator[None]:
        """Times a wait. Use it only around a wait that would block."""
        start = time.monotonic()
        try:
            yield
        finally:
            end = time.monotonic()
            with self._lock:
                self._stalls[label] += end - start
            self._timeline.add("wait", f"{label} ({self.name})", start, end)

    def read(self) -> LinkStats:
        self._collect()
        with self._lock:
            return LinkStats(
                moved_bytes=self._moved_bytes,
                copies=self._copies,
                busy_seconds=self._busy_seconds,
                stall_seconds=sum(self._stalls.values()),
                stalls=dict(self._stalls),
            )
