"""What the ranks will do together until they meet again: learned by watching, followed turn by turn. Pure bookkeeping."""

import hashlib
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

GATHER, REDUCE, SUM, NEAR = 1, 2, 3, 4
"""Collectives: of a group's parameters, of its gradients, and the sum of a few numbers (a norm). NEAR: of a group's parameters,
inside each node ([Note: replica] in shards/replica.py)."""
MOST_REPEATS = 8
"""Equal recordings that are asked for at most, after scripts that failed."""
MOST_ENTRIES = 256
"""Situations that are remembered; the oldest makes room."""


class Op(NamedTuple):
    """A collective."""

    kind: int
    group: int


class Turn(NamedTuple):
    """One collective of a script. The first two fields are alike on all ranks, the others are this rank's part in it."""

    op: Op
    present: tuple[int, ...] = ()
    """REDUCE: which parameters have a gradient on some rank, as bits."""
    wanted: bool = True
    """This rank asked for it. Otherwise it served the others."""
    own: tuple[int, ...] = ()
    """REDUCE: which parameters this rank contributed a gradient for, as bits."""


Script = tuple[Turn, ...]


def fingerprint(script: Sequence[Turn]) -> int:
    """A number of 62 bits, never 0, the same for the same collectives on every rank."""
    common = [(*turn.op, turn.present) for turn in script]
    digest = hashlib.blake2b(repr(common).encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 2) | 1


class Follow:
    """A rank's way through a script: which turn is next, which ones to serve on the way to one that is needed."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self._at = 0

    def is_next(self, op: Op) -> bool:
        return self._at < len(self.script) and self.script[self._at].op == op

    def go_to(self, op: Op) -> Iterator[Turn] | None:
        """The turns up to the one that is asked for, one by one as they are taken. None when it comes no more."""
        for at in range(self._at, len(self.script)):
            if self.script[at].op == op:
                return self._until(at + 1)
        return None

    def go_to_end(self) -> Iterator[Turn]:
        """All turns that are left, one by one as they are taken."""
        return self._until(len(self.script))

    def _until(self, end: int) -> Iterator[Turn]:
        while self._at < end:
            self._at += 1
            yield self.script[self._at - 1]


@dataclass
class _Entry:
    script: Script
    repeats: int = 0
    """Equal recordings in a row."""
    needed: int = 1
    """How many of them it takes."""
    steady: bool = True
    """Whether the last recording was of a pass that went as predicted."""


@dataclass
class Book:
    """Which script followed which situation.

    At first one recording is enough if its pass went as predicted. Otherwise it takes two, because such a pass fetched nothing
    ahead, which a script should. Where another script was expected it takes two equal recordings, and twice as many after each
    script that failed, up to ``MOST_REPEATS``; half as many after each one that held. So a loop that changes now
    and then soon follows a script again, and a loop that changes all the time follows none.
    """

    _entries: dict[Hashable, _Entry] = field(default_factory=dict)

    def expected(self, situation: Hashable) -> Script | None:
        entry = self._entries.get(situation)
        if entry is None or entry.repeats < max(entry.needed, 1 if entry.steady else 2):
            return None
        return entry.script

    def learn(self, situation: Hashable, script: Script, steady: bool = True) -> None:
        """What happened without a script. ``steady``: the pass went as predicted."""
        entry = self._entries.pop(situation, None) or _Entry(script)
        if fingerprint(entry.script) == fingerprint(script):
            entry.repeats += 1
        else:
            entry.repeats = 1
            if entry.steady:
                entry.needed = max(2, entry.needed)
        entry.script, entry.steady = script, steady
        self._entries[situation] = entry
        if len(self._entries) > MOST_ENTRIES:
            del self._entries[next(iter(self._entries))]

    def held(self, situation: Hashable) -> None:
        """The script was followed to its end by all ranks."""
        if situation in self._entries:
            entry = self._entries[situation]
            entry.needed = max(1, entry.needed // 2)

    def failed(self, situation: Hashable) -> None:
        """Some rank needed something else."""
        if situation in self._entries:
            entry = self._entries[situation]
            entry.repeats, entry.needed = 0, min(2 * entry.needed, MOST_REPEATS)


class Reduced(NamedTuple):
    """A reduction by script."""

    group: int
    assumed: set[int]
    own: tuple[int, ...]


@dataclass
class Segment:
    """From one meeting to the next."""

    situation: Hashable
    follow: Follow | None = None
    models: int = 0
    """Models that had been sharded over these ranks when it began."""
    negotiated: list[Turn] = field(default_factory=list)
    deviated: bool = False
    reduced: list[Reduced] = field(default_factory=list)
    known: dict[int, set[int]] = field(default_factory=dict)
    """By group: parameters that surely have a gradient, apart from what reductions by script assume."""
