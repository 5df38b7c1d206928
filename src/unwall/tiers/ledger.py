"""Counts the bytes a tier holds and refuses what would not fit."""

import threading
import weakref
from collections import deque
from collections.abc import Callable
from typing import Literal, Protocol

from unwall.tiers.sizes import format_bytes

TierName = Literal["device", "host", "disk"]


class BudgetError(RuntimeError):
    """A request would take a tier past its budget. Nothing was allocated."""

    def __init__(
        self, tier: TierName, asked_bytes: int, live_bytes: int, budget_bytes: int, label: str, advice: str = ""
    ) -> None:
        advice = advice or f"Raise {tier}_bytes in the Plan, or move state to a larger tier."
        super().__init__(
            f"{tier} tier: {label or 'a request'} needs {format_bytes(asked_bytes)} ({asked_bytes} bytes), but "
            f"{format_bytes(live_bytes)} of its budget of {format_bytes(budget_bytes)} ({budget_bytes} bytes) are in use. "
            f"{advice}"
        )
        self.tier = tier
        self.asked_bytes = asked_bytes
        self.live_bytes = live_bytes
        self.budget_bytes = budget_bytes
        self.label = label

    def advising(self, advice: str) -> "BudgetError":
        """The same, with other advice."""
        return BudgetError(self.tier, self.asked_bytes, self.live_bytes, self.budget_bytes, self.label, advice)


class Holder(Protocol):
    """Whose bytes they are: a block."""

    charged_bytes: int


class Ledger:
    """Live and peak bytes of one tier against its budget. Safe to use from several threads.

    A block's bytes are counted from ``charge`` to ``discharge``, or until the block goes (``abandon``, from its finaliser). The
    count and what the block says of it change together, between two calls: an exception out of nowhere finds them equal.
    """

    def __init__(self, tier: TierName, budget_bytes: int | None = None) -> None:
        if budget_bytes is not None and budget_bytes < 0:
            raise ValueError(f"{tier}_bytes must not be negative, got {budget_bytes}")
        self.tier = tier
        self.budget_bytes = budget_bytes
        self._reclaimers: list[weakref.WeakMethod[Callable[[], None]]] = []
        """Asked to give back what they can do without, before a request is refused. They may wait for work that uses it, on the
        thread that asked: ask with no lock held that such work takes. See [Note: who waits for whom] in optim/early.py."""
        self._lock = threading.Lock()
        self._live = 0
        self._peak = 0
        self._abandoned: deque[int] = deque()  # a finaliser must not wait for the lock

    @property
    def live_bytes(self) -> int:
        if self._abandoned:
            self._collect()
        return self._live

    @property
    def peak_bytes(self) -> int:
        return self._peak

    @property
    def free_bytes(self) -> int | None:
        """What the budget leaves, or None without a budget."""
        return None if self.budget_bytes is None else self.budget_bytes - self.live_bytes

    def reserve(self, nbytes: int, label: str = "") -> None:
        """Counts ``nbytes`` as live, or raises BudgetError and counts nothing."""
        self._reserve(nbytes, label, None)

    def charge(self, holder: Holder, nbytes: int, label: str = "") -> None:
        """The same; from that moment on they are the holder's."""
        self._reserve(nbytes, label, holder)

    def note(self, holder: Holder, nbytes: int) -> None:
        """The same for memory that is taken in any case: nothing is refused."""
        self._count(nbytes, "", holder, refuse=False)

    def discharge(self, holder: Holder) -> None:
        """The holder's bytes are counted no more. Nothing to do where they are not."""
        with self._lock:
            nbytes = holder.charged_bytes
            holder.charged_bytes = 0
            self._live -= nbytes

    def abandon(self, nbytes: int) -> None:
        """The holder of these bytes is gone. For finalisers: takes no lock."""
        self._abandoned.append(nbytes)

    def _collect(self) -> None:
        with self._lock:
            while self._abandoned:
                self._live -= self._abandoned.popleft()

    def _reserve(self, nbytes: int, label: str, holder: Holder | None) -> None:
        try:
            self._count(nbytes, label, holder)
        except BudgetError:
            if not self.reclaim():
                raise
            self._count(nbytes, label, holder)

    def ask_before_refusing(self, method: Callable[[], None]) -> None:
        """A bound method that gives back what its object can do without. Known for as long as that object lives."""
        with self._lock:
            if not any(known() == method for known in self._reclaimers):
                self._reclaimers.append(weakref.WeakMethod(method))

    def reclaim(self) -> bool:
        """Asks for what others can do without. False: there is nobody to ask."""
        with self._lock:
            self._reclaimers = [method for method in self._reclaimers if method() is not None]
            asked = list(self._reclaimers)
        for method in asked:
            call = method()
            if call is not None:
                call()
        return bool(asked)

    def _count(self, nbytes: int, label: str, holder: Holder | None, *, refuse: bool = True) -> None:
        if self._abandoned:
            self._collect()
        with self._lock:
            if refuse and self.budget_bytes is not None and self._live + nbytes > self.budget_bytes:
                raise BudgetError(self.tier, nbytes, self._live, self.budget_bytes, label)
            if holder is not None:
                holder.charged_bytes = nbytes
            self._live += nbytes
            self._peak = max(self._peak, self._live)

    def release(self, nbytes: int) -> None:
        with self._lock:
            if nbytes > self._live:
                raise RuntimeError(f"{self.tier} tier: {nbytes} bytes released, but only {self._live} are live")
            self._live -= nbytes

    def reset_peak(self) -> None:
        """The peak counts anew from what is live now."""
        with self._lock:
            self._peak = self._live
