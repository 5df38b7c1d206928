"""Ctrl-C and SIGTERM: the step that runs is finished, the run is saved, and the command ends."""

import signal
import time
from types import FrameType, TracebackType
from typing import Any

AT_ONCE_S = 2.0
"""A launcher passes on the Ctrl-C that the terminal has sent to everyone: two that come so close are one."""


class StopRequests:
    """Inside, a signal is only noted. A second Ctrl-C ends the command at once, without saving."""

    def __init__(self) -> None:
        self.asked: str | None = None
        """The signal's name."""
        self._first = 0.0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "StopRequests":
        for number in (signal.SIGINT, signal.SIGTERM):
            self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002 (of signal's signature)
        now = time.monotonic()
        if self.asked is not None and number == signal.SIGINT and now - self._first > AT_ONCE_S:
            raise KeyboardInterrupt
        if self.asked is None:
            self._first, self.asked = now, signal.Signals(number).name
