"""What waits for other ranks on the device, and is given up when they will not come."""

import contextlib
import sys
import time
import weakref
from typing import Protocol

SAY_S = 0.1
"""How long before anything is given up whoever waits may raise."""


class OnDevice(Protocol):
    """May have work on the device that will not end."""

    def give_up(self) -> None:
        """Ends it."""


class Stuck:
    """All that there is of it on this rank, for as long as it is there."""

    def __init__(self) -> None:
        self._all: weakref.WeakSet[OnDevice] = weakref.WeakSet()
        self._held: list[OnDevice] = []

    def __bool__(self) -> bool:
        return bool(self._all or self._held)

    def add(self, work: OnDevice) -> None:
        self._all.add(work)

    def hold(self) -> None:
        """The ranks cannot go on: whoever waits raises from now on, and its model may go before anything is given up here. Then
        the model's finalisers wait for the device, and for that. So it is held until then."""
        self._held += self._all

    def give_up(self, why: str) -> None:
        """Says why first. torch's watchdog takes what is given up for a failure and may end the process, before whoever waits
        has raised: whoever does not wait for the device raises meanwhile."""
        with contextlib.suppress(Exception):
            print(why, file=sys.stderr, flush=True)
        time.sleep(SAY_S)
        for work in {*self._held, *self._all}:
            work.give_up()
        self._held.clear()
        self._all.clear()
