"""Updates ahead of their step: what one of them is, and which of them is next.

[Note: newest first]
Of the gradients that have landed, the newest is used first: it belongs to the front of the model, which the next forward needs
first. Where the host updates more slowly than backward computes, something is left over at ``step``. Taken in the order of
landing that would be the front of the model, all of it, and forward would wait. This way it is a group here and there, updated
while forward is on its way to it.
"""

import enum
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from unwall.optim.runs import Run
from unwall.optim.shadows import Shadow
from unwall.optim.updates import HostUpdate, Rest
from unwall.shards.states import StateKey
from unwall.shards.store import Store
from unwall.tiers.ticket import Ticket

Key = tuple[int, int]
"""A group: its engine's id and its index."""


class Wanted(enum.Enum):
    """Whether the result of a speculation can be of use. Decided by the thread that trains."""

    YES = "yes"
    IF_BEGUN = "if it has begun"
    """``step`` has come, and will use what there is."""
    NO = "no"


class Progress(enum.Enum):
    """How far a speculation is. Decided by the thread that updates, which begins only what is wanted."""

    QUEUED = "queued"
    RUNNING = "running"
    FINISHED = "finished"
    FAILED = "failed"
    RESOLVED = "resolved"
    """Committed, or given up for an update in place."""


@dataclass(eq=False)
class Speculation:
    """An update into a shadow, and what it took for granted."""

    shadow: Shadow | None
    """Where it writes. None: in place, see optim/journaled.py."""
    through_disk: bool
    stores: dict[StateKey, Store]
    runs: list[Run]
    serial: int
    """Of the gradient."""
    generation: int
    """Of the group."""
    landing: Ticket | None
    compute: Callable[[], Rest | None] = lambda: None
    wanted: Wanted = Wanted.YES
    progress: Progress = Progress.QUEUED
    commit: HostUpdate | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _ended: threading.Event = field(default_factory=threading.Event)

    def begin(self) -> bool:
        """On the thread that updates: whether to go on with ``run``."""
        with self._lock:
            if self.wanted is Wanted.YES and self.progress is Progress.QUEUED:
                self.progress = Progress.RUNNING
                return True
            return False

    def run(self) -> Rest | None:
        """A failure is no error yet: ``step`` will update in place. What is left goes on beside the next update."""
        try:
            rest = self.compute()
        except Exception:
            self._end_as(Progress.FAILED)
            return None
        if rest is None:
            self._end_as(Progress.FINISHED)
            return None
        return Rest(lambda: self._finish(rest), ())

    def _finish(self, rest: Rest) -> None:
        try:
            rest.finish()
        except Exception:
            self._end_as(Progress.FAILED)
        else:
            self._end_as(Progress.FINISHED)

    def _end_as(self, progress: Progress) -> None:
        self.progress = progress
        self._ended.set()

    def await_end(self) -> None:
        """What was begun has ended, well or not."""
        if self.progress is Progress.RUNNING:
            self._ended.wait()

    def want(self, wanted: Wanted) -> None:
        with self._lock:
            self.wanted = wanted

    @property
    def landed(self) -> bool:
        """The gradient is there."""
        return self.landing is None or self.landing.done()

    @property
    def under_way(self) -> bool:
        return self.wanted is not Wanted.NO and self.progress in (Progress.QUEUED, Progress.RUNNING)

    @property
    def settled(self) -> bool:
        """It will not touch its shadow any more."""
        if self.progress is Progress.RESOLVED:
            return True
        return self.wanted is Wanted.NO and self.progress is not Progress.RUNNING

    def stop(self) -> None:
        """Waits until it is settled, and gives up what will not be committed."""
        if self.commit is not None:
            self.commit.wait()
            return
        self.want(Wanted.NO)
        self.await_end()


class Speculations:
    """Those of one optimizer: each under its group until ``step`` takes it, and in line until it is begun.

    Safe to use from several threads: memory may be reclaimed on the thread that updates. Waits for nothing.
    """

    def __init__(self) -> None:
        self._open: dict[Key, Speculation] = {}
        self._line: list[Speculation] = []
        """Not begun, the newest last."""
        self._lock = threading.Lock()

    def add(self, key: Key, speculation: Speculation) -> None:
        with self._lock:
            self._open[key] = speculation
            self._line.append(speculation)

    def take(self, key: Key) -> Speculation | None:
        """The one of a group, which is not looked after here any more. It stays in line."""
        with self._lock:
            return self._open.pop(key, None)

    def has(self, speculation: Speculation) -> bool:
        """Whether it is one of those that ``step`` has not taken yet."""
        with self._lock:
            return any(known is speculation for known in self._open.values())

    def open(self) -> list[Speculation]:
        """Those that ``step`` has not taken yet."""
        with self._lock:
            return list(self._open.values())

    def forget(self) -> None:
        """None of them is wanted any more."""
        if not self._open and not self._line:
            return
        with self._lock:
            for speculation in self._open.values():
                speculation.want(Wanted.NO)
            self._open.clear()
            self._prune()

    def is_next(self, speculation: Speculation) -> bool:
        with self._lock:
            return self._next() is speculation

    def run_next(self) -> Rest | None:
        """On the thread that updates. See [Note: newest first]: each time the best of those that wait."""
        with self._lock:
            found = self._next()
            if found is not None:
                self._line.remove(found)
        return found.run() if found is not None and found.begin() else None

    def _next(self) -> Speculation | None:
        self._prune()
        landed = [waiting for waiting in self._line if waiting.landed]
        return landed[-1] if landed else next(iter(self._line), None)  # the oldest lands first

    def _prune(self) -> None:
        """Keeps nothing that is not wanted."""
        self._line = [waiting for waiting in self._line if waiting.wanted is Wanted.YES]
