"""Counts what crosses a link between two tiers, and how long anyone waited for it."""

import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class LinkStats:
    """What a link did since the last reset."""

    moved_bytes: int
    """Bytes of all copies that were submitted."""
    copies: int
    """How many copies that were."""
    stall_seconds: float
    """Time a caller was blocked at the point of use, waiting for this link."""
    stalls: dict[str, float]
    """The same by label (the group that was waited for)."""


class LinkMeter:
    """The counters of one link. Safe to use from several threads."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._lock = threading.Lock()
        self.reset()

    def reset(self) -> None:
        with self._lock:
            self._moved_bytes = 0
            self._copies = 0
            self._stalls: defaultdict[str, float] = defaultdict(float)

    def add(self, nbytes: int) -> None:
        with self._lock:
            self._moved_bytes += nbytes
            self._copies += 1

    @contextmanager
    def stalled(self, label: str) -> Iterator[None]:
        """Times a wait. Use it only around a wait that would block."""
        start = time.perf_counter()
        try:
            yield
        finally:
            seconds = time.perf_counter() - start
            with self._lock:
                self._stalls[label] += seconds

    def read(self) -> LinkStats:
        with self._lock:
            return LinkStats(
                moved_bytes=self._moved_bytes,
                copies=self._copies,
                stall_seconds=sum(self._stalls.values()),
                stalls=dict(self._stalls),
            )
