"""Whose failed update holds up whose."""

import weakref

from unwall.tiers.ticket import Ticket


class FailureDomain:
    """Updates that stay behind one another when one of them fails: those of one model, which were promised in order and share
    the memory that the failed one holds on to. Only the thread that updates looks at it and changes it.

    The failed update is held weakly: when nobody waits for it any more, nobody is held up by it.
    """

    def __init__(self) -> None:
        self._failed: weakref.ref[Ticket] | None = None

    @property
    def failed(self) -> Ticket | None:
        """The update that has to come through before the others."""
        return None if self._failed is None else self._failed()

    def fail(self, update: "weakref.ref[Ticket]") -> None:
        self._failed = update

    def recover(self) -> None:
        self._failed = None
