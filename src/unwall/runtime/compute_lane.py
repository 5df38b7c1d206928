"""What the device computes between one group and the next, and how long it waited for each, while the time line is on."""

import time

import torch

from unwall.tiers.links import Links
from unwall.tiers.meter import LinkMeter

_STALL_SECONDS = 20e-6
"""Shorter waits are the cost of looking."""


class ComputeLane:
    """``leave`` before a group is waited for, ``enter`` when it is there: what lies between two groups is compute."""

    def __init__(self, links: Links) -> None:
        self._links = links
        self._compute = LinkMeter("compute", links.timeline)
        self._stall = LinkMeter("stall", links.timeline)
        self._entered: tuple[float, torch.cuda.Event | None, str] | None = None
        self._left: tuple[float, torch.cuda.Event | None] | None = None

    @property
    def watching(self) -> bool:
        """Whether the time line is on."""
        return self._links.timeline.spans is not None

    def leave(self) -> None:
        """Compute queued so far belongs to the group that was entered last."""
        if self._links.timeline.spans is None:
            self._entered = self._left = None
            return
        now, event = self._mark()
        if self._entered is not None:
            start, start_event, label = self._entered
            self._add(self._compute, label, (start, start_event), (now, event))
        self._entered, self._left = None, (now, event)

    def enter(self, label: str) -> None:
        """The group is there (or, on a stream, will be when what is queued from now on runs)."""
        if self._links.timeline.spans is None:
            return
        now, event = self._mark()
        if self._left is not None and (event is not None or now - self._left[0] > _STALL_SECONDS):
            self._add(self._stall, label, self._left, (now, event))
        self._entered, self._left = (now, event, label), None

    def collect(self) -> None:
        """Everything queued so far has ended and is on the time line."""
        for meter in (self._compute, self._stall):
            meter.read()

    def _mark(self) -> "tuple[float, torch.cuda.Event | None]":
        if self._links.clock is None:
            return time.monotonic(), None
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._links.device.device))
        return 0.0, event

    def _add(
        self,
        meter: LinkMeter,
        label: str,
        start: "tuple[float, torch.cuda.Event | None]",
        end: "tuple[float, torch.cuda.Event | None]",
    ) -> None:
        if start[1] is None or end[1] is None or self._links.clock is None:
            meter.busy(label, start[0], end[0])
        else:
            meter.watch_events(start[1], end[1], label, self._links.clock)
