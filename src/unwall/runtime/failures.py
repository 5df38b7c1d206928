"""Whose failed update holds up whose."""

import threading
import weakref

from unwall.tiers.ticket import Ticket


class FailureDomain:
    """Updates that stay behind one another when one of them fails: those of one model, which were promised in order and share
    the memory that the failed one holds on to. The threads that update look at it and change it.

    Failed updates are held weakly: when nobody waits for one any more, nobody is held up by it.
    """

    def __init__(self) -> None:
        self._failed: list[weakref.ref[Ticket]] = []
        """The first that failed first: another one may have been under way beside it."""
        self._lock = threading.Lock()

    @property
    def failed(self) -> Ticket | None:
        """The update that has to come through before the others."""
        with self._lock:
            return next((found for known in self._failed if (found := known()) is not None), None)

    def fail(self, update: "weakref.ref[Ticket]") -> None:
        with self._lock:
            if update not in self._failed:
                self._failed = [*(known for known in self._failed if known() is not None), update]

    def recover(self, update: "weakref.ref[Ticket]") -> None:
        with self._lock:
            if update in self._failed:
                self._failed.remove(update)
