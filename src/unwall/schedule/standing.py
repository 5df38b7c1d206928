"""Where this rank stands in the training loop, what it says of that to the others, and what it does when it fails.

[Note: faults]
A rank fails in the middle of a pass: a drive, memory, an exception in the user's forward. The others wait for it, in a
collective or in an exchange, or will soon. It raises its own error at once; before that it writes it down for them
(shards/watch.py), takes part in every collective that was agreed on with values that mean nothing (shards/feign.py), and
answers the exchange that comes then with FAILED. All of this is begun without waiting for anybody. A rank that hears of the
fault before it begins its next collective does the same. So every rank comes to that one exchange, having begun the same
collectives as all others, and there everybody learns who failed: whoever has no error of its own raises PeerError. Then what
was gathered since is dropped, the gradients since the last step are forgotten (not after an exception in a forward, which
leaves them alone), and the counts of forwards, backwards and steps are made equal. The next iteration runs as after any other
error in a loop.

The rank that failed waits a moment for that exchange. If the others take longer it goes on without, and first thing ends the
exchange when the model is used again. A pass may also end where nobody sees it (an exception in the user's part of a backward,
a Ctrl-C: torch calls no hooks then). The thread that watches notices, and does all of this in the rank's place, except to end
the exchange (``fail_aside``); ``Watch.lock`` keeps it away while the rank itself agrees on something.

Two faults cannot be healed: a rank that is gone, and one that fails where the others may have updated the model already (in a
``step``). Then all ranks get a DivergedError, and the model cannot be used any more.

What is raised around a step (the user's hooks, an option that makes no sense) is often raised on all ranks alike, and then
there is nothing to tell: each has its own error, and all are at the same point. So a rank asks the store for a moment whether
the others have come to the same (``fail_alone``).
"""

import math
import zlib
from array import array
from collections.abc import Callable, Iterable, Sequence
from threading import get_ident
from typing import NamedTuple
from weakref import WeakMethod

from unwall.schedule.announcement import FAILED, SPOILT, TOLD, Row, fingerprint, in_words
from unwall.schedule.script import GATHER, NEAR, REDUCE, Op
from unwall.shards.collectives import Ranks
from unwall.shards.control import DivergedError, Exchange, PeerError
from unwall.shards.feign import Feigned

ANNOUNCED = "announcements"
"""The kind of exchange in which the ranks say where they are."""
APART = (
    "Other ranks have taken a step that it has not: the model is not the same on all ranks any more, and cannot be used. Start "
    "all ranks again from a checkpoint"
)
PATIENCE_S = 1.0
"""How long a rank that failed waits for the others before it raises its error."""
CLOSE, NOTHING = 1e-5, 1e-15
"""Numbers whose relative difference, or whose difference, is less are taken to be the same: near the end of a cosine nothing is
left but its last bits."""
ALIKE_S = 10.0
"""How long a rank that failed around a step waits for others that fail alike, unless one of them waits for it: they have just
met, after the backward."""


class Promise(NamedTuple):
    """A collective that the others count on."""

    op: Op
    begun: int = 0
    """How many of the collectives that it consists of have begun."""


class Said(NamedTuple):
    """Numbers that must be the same on all ranks."""

    values: "array[float]"
    names: Callable[[], list[str]]
    advice: str
    """To a user whose ranks differ."""


class Standing:
    """One rank's. See [Note: faults]. ``promised`` gives the collectives that were agreed on and not begun; ``regroup`` is
    called when all ranks have met after a fault, and told whether the gradients are spoilt."""

    def __init__(
        self,
        ranks: Ranks,
        names: Sequence[str],
        feigned: Feigned,
        promised: Callable[[], Iterable[Promise]],
        regroup: Callable[[bool], None],
    ) -> None:
        self.forwards = self.backwards = self.steps = 0
        self.called = ""
        """At a meeting of the kind WHOLE: what."""
        self.noted: list[str] = []
        """What else was called since the last meeting."""
        self.said: list[Said] = []
        """Numbers of steps and of writes since the last meeting."""
        self.at: Op | None = None
        """The last collective."""
        self.failed = False
        """Whether the pass has failed, here or elsewhere."""
        self._ranks = ranks
        self._control = ranks.control
        self._names = names
        self._feigned = feigned
        self._promised = promised
        self._regroup = regroup
        self._apart = ""  # how the ranks diverged: they cannot find together again
        self._parting: Exchange | None = None  # in which the others learn of this rank's fault
        self._alike = 0  # errors that came to all ranks

    @property
    def apart(self) -> bool:
        """Whether the ranks have diverged for good."""
        return bool(self._apart)

    # -- words --------------------------------------------------------------------------------------------------------

    def announce(self, kind: int, group: int = 0, script: int = 0, flags: int = 0) -> list[Row]:
        """Every rank's row. DivergedError, on each of them, when they are not in the same forward, backward and step."""
        self.ready()
        mine = self._row(kind, group, script, flags)
        rows = [Row(*row) for row in self._control.exchange(ANNOUNCED, mine, in_words(mine, self._names, self.called))]
        if any(row.kind == FAILED for row in rows):
            raise self._learn(rows)
        if any(row.point != mine.point for row in rows) and not self._said_alike(rows):
            raise self.diverged(rows)
        self.said.clear()  # all ranks have: a loop that writes and never meets must not keep it
        return rows

    def ready(self) -> None:
        """Before anything with the other ranks. Raises where the ranks are apart, or one of them has told of a fault."""
        if self._parting is not None:
            self.rejoin()
        self.check()
        if self._control.watch.fault:
            raise PeerError(_told(self._control.watch.fault))

    def check(self) -> None:
        """Raises where the ranks are apart."""
        apart = self._apart or (self._control.watch.end if self._ranks.size > 1 else "")
        if apart:
            raise DivergedError(f"the ranks have diverged before, and this model cannot be used any more: {apart}")

    def anew(self, called: str = "") -> None:
        """Something begins that the ranks do together: a pass, a step, or what is ``called``."""
        self.rejoin()
        self.check()
        self.failed = False
        self.called = called
        if self._ranks.size > 1:
            self._control.watch.place = WeakMethod(self._where)
            self._control.watch.thread = get_ident()

    def _row(self, kind: int, group: int, script: int = 0, flags: int = 0) -> Row:
        calls, numbers = fingerprint(self.noted), 0
        for said in self.said:
            numbers = zlib.crc32(said.values, numbers) | 1
        return Row(self._control.model, kind, group, self.forwards, self.backwards, self.steps, calls, script, flags, numbers)

    def met(self) -> None:
        """All ranks have said what they did since they met last, and it was the same."""
        self.noted.clear()
        self.said.clear()

    # -- faults -------------------------------------------------------------------------------------------------------

    def fail_aside(self, text: str, spoilt: bool) -> None:
        """The same for the thread that watches, which waits for nobody."""
        if self._control.watch.parting is None:
            self.fail(text, spoilt, patience_s=0.0)

    def fail(self, error: BaseException | str, spoilt: bool, patience_s: float | None = None) -> None:
        """This rank cannot go on with what it was at. See [Note: faults]. ``spoilt``: nor can the gradients be used."""
        if self._ranks.size == 1 or self.apart:
            return
        with self._control.watch.lock:
            failed, self.failed = self.failed, True
        if failed:
            return
        told = isinstance(error, PeerError)
        if isinstance(error, DivergedError) and not told:
            self._apart = self._apart or str(error)
            return
        text = error if isinstance(error, str) else f"{type(error).__name__}: {error}"
        text = f"{text} (rank {self._ranks.rank} was {self._where()})"
        try:
            with self._control.watch.lock:
                self._part(text, (TOLD if told else 0) | (SPOILT if spoilt else 0))
            patience_s = PATIENCE_S if patience_s is None else patience_s
            if patience_s and self._parting is not None:
                self._await_others(self._parting, patience_s)
        except BaseException as second:
            self.end(f"{text}; and then it could not meet the others: {type(second).__name__}: {second}")

    def _part(self, text: str, flags: int) -> None:
        if not flags & TOLD:
            self._control.watch.tell_fault(text)
        for op, begun in self._promised():
            if op.kind == GATHER:
                self._feigned.gather(op.group, begun)
            elif op.kind == NEAR:
                self._feigned.gather_near(op.group, begun)
            elif op.kind == REDUCE:
                self._feigned.reduce(op.group, begun)
                flags |= SPOILT
            else:
                raise RuntimeError("the others count on its part of a norm in a step. Start all ranks again from a checkpoint")
        self._parting = self._control.begin_exchange(ANNOUNCED, self._row(FAILED, 0, flags=flags))
        self._control.watch.parting = WeakMethod(self.rejoin)

    def _await_others(self, parting: Exchange, seconds: float) -> None:
        if self._control.wait(parting.work, "an error of its own", seconds):
            self.rejoin()

    def fail_alone(self, error: BaseException, why: str = "") -> bool:
        """This rank failed around a step. Nothing to tell where all ranks did; ``why`` they cannot go on, where that is so.
        True where the ranks were told that."""
        if self._ranks.size == 1 or self.apart or self.failed:
            return False
        watch = self._control.watch
        seconds = ALIKE_S if isinstance(error, Exception) else min(ALIKE_S, PATIENCE_S)  # Ctrl-C comes to all at once
        if watch.come_alike(f"alike/{self._control.model}/{watch.faults}/{self._alike}", seconds):
            self._alike += 1
            return False
        if why:
            return self.fail_for_good(error, why)
        self.fail(error, spoilt=False)
        return self.apart

    def fail_for_good(self, error: BaseException, why: str) -> bool:
        """This rank failed where the others may have updated the model; ``why`` they cannot go on."""
        if self._ranks.size > 1 and not self.apart and not self.failed:
            self.end(f"{type(error).__name__}: {error} (rank {self._ranks.rank} was {self._where()}); {why}")
            return True
        return False

    def end(self, text: str) -> None:
        """The ranks cannot go on."""
        self._apart = f"rank {self._ranks.rank} failed, and the ranks cannot go on: {text}"
        if self._ranks.size > 1:
            self._control.watch.tell_end(self._apart)

    def rejoin(self) -> None:
        """Ends the exchange in which the others learn of this rank's fault."""
        if self._parting is None:
            return
        rows = [Row(*row) for row in self._control.end_exchange(self._parting, "the end of a pass that failed")]
        self._parting = self._control.watch.parting = None
        self._learn(rows)

    def _learn(self, rows: list[Row]) -> DivergedError:
        """All ranks have met after a fault. What to raise on a rank that has no error of its own."""
        if any(row.model != self._control.model for row in rows):
            return self.diverged(rows)
        watch = self._control.watch
        failed = [rank for rank, row in enumerate(rows) if row.kind == FAILED and not row.flags & TOLD]
        spoilt = any(row.flags & SPOILT for row in rows)
        text = watch.faults_of(failed)
        watch.faults += 1
        self._alike = 0
        self.failed = True
        self.forwards = max(row.forwards for row in rows)
        self.backwards = max(row.backwards for row in rows)
        self.steps = max(row.steps for row in rows)
        self.met()
        self._feigned.end()
        self._regroup(spoilt)
        if any(row.steps != self.steps for row in rows):
            self._apart = f"{text}. {APART}"
            return DivergedError(self._apart)
        return PeerError(_told(text))

    # -- errors -------------------------------------------------------------------------------------------------------

    def diverged(self, rows: list[Row]) -> DivergedError:
        """The ranks are not at the same point, and all of them know it."""
        told = self._control.tell(self._place(rows[self._ranks.rank]))
        places = [
            f"rank {rank} is at {'another sharded model: ' if row.model != self._control.model else ''}{place}"
            for rank, (row, place) in enumerate(zip(rows, told, strict=True))
        ]
        self._apart = (
            f"the ranks are not at the same point: {'; '.join(places)}. All ranks must run the same forwards, backwards and "
            "steps, and call state_dict, full_params and the like together"
        )
        return DivergedError(self._apart)

    def _said_alike(self, rows: list[Row]) -> bool:
        """Whether the ranks differ only in the last bits of what they said (a cosine of another machine's). DivergedError where
        they differ in nothing but that, and by more."""
        numbers = {row.numbers for row in rows}
        if len({row.point[:-1] for row in rows}) > 1 or (0 in numbers and len({row.kind for row in rows}) > 1):
            return False
        mine = [(*pair, said.advice) for said in self.said for pair in zip(said.names(), said.values, strict=False)]
        every = self._control.every(mine, "numbers that must be the same on all ranks")
        differing, advice = [], ""
        of_all: dict[tuple[str, str], list[list[float]]] = {}
        for rank, row in enumerate(every):
            for name, value, given in row:
                of_all.setdefault((name, given), [[] for _ in every])[rank].append(value)
        for (name, given), found in of_all.items():
            if not all(_close(values, found[0]) for values in found):
                shown = (" and ".join(f"{value:.7g}" for value in values) or "none" for values in found)
                differing.append(f"{name} is {', '.join(f'{text} on rank {rank}' for rank, text in enumerate(shown))}")
                advice = advice or given
        if differing:
            self._apart = f"the ranks differ: {'; '.join(differing[:5])}. {advice}, and start them again from a checkpoint"
            raise DivergedError(self._apart)
        return True

    def _place(self, mine: Row) -> str:
        """Where this rank is, in words."""
        noted = f", having called {', '.join(self.noted)}" if self.noted else ""
        where = f"(forward {mine.forwards}, after {mine.backwards} backwards, {mine.steps} steps{noted})"
        return f"{in_words(mine, self._names, self.called)} {where}"

    def _where(self) -> str:
        """The same at any moment, for a rank that waits for this one."""
        at = f"; its last collective: {in_words(self._row(*self.at), self._names, '')}" if self.at is not None else ""
        called = f"; it called {self.called}" if self.called else ""
        return f"in or after forward {self.forwards}, with {self.backwards} backwards, {self.steps} steps{at}{called}"


def _close(some: Sequence[float], others: Sequence[float]) -> bool:
    return len(some) == len(others) and all(
        math.isclose(one, other, rel_tol=CLOSE, abs_tol=NOTHING) or (math.isnan(one) and math.isnan(other))
        for one, other in zip(some, others, strict=True)
    )


def _told(text: str) -> str:
    return (
        f"{text}. What was under way is given up on all ranks (in a backward: the gradients since the last step, too); "
        "they can go on together from here"
    )
