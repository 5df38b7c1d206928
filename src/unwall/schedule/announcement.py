"""What a rank announces when the ranks agree on what comes next. See [Note: agreement] in schedule/agreement.py."""

import zlib
from collections.abc import Sequence
from typing import NamedTuple

from unwall.schedule.script import GATHER, NEAR, REDUCE, SUM, Op

END_FORWARD, END_BACKWARD, STEP, WHOLE, FAILED = 11, 12, 13, 14, 15
"""Meetings. WHOLE: ``state_dict`` and the like, which all ranks call at once. FAILED: the rank cannot go on with its pass."""
_WHAT = {
    SUM: "the norm of the gradients",
    END_FORWARD: "the end of a forward",
    END_BACKWARD: "the end of a backward",
    STEP: "a step",
    FAILED: "an error",
}
DEVIATED, PENDING, TOLD, SPOILT = 1, 2, 4, 8
"""Flags: it contributed something else than its script says; it keeps gradients that were not reduced; it failed because it
was told of another rank's fault; the gradients since the last step are not to be used."""
KEPT_SHIFT = 8
"""Above the flags, at the end of a backward: the fingerprint of which gradients it keeps, 0 where it keeps none."""


class Row(NamedTuple):
    """What a rank announces."""

    model: int
    kind: int
    group: int
    """At WHOLE: the fingerprint of what is called."""
    forwards: int
    backwards: int
    steps: int
    calls: int
    """The fingerprint of what else it has called since the last meeting, 0 where it is nothing."""
    script: int
    """At a meeting: the fingerprint of what it expects until the next one, 0 where it expects nothing."""
    flags: int
    numbers: int = 0
    """The fingerprint of what it has said since the ranks last compared (numbers of steps, sums of writes), 0 for nothing."""

    @property
    def op(self) -> Op | None:
        return Op(self.kind, self.group) if self.kind in (GATHER, REDUCE, SUM, NEAR) else None

    @property
    def point(self) -> tuple[int, ...]:
        """What must be the same on all ranks."""
        return self.model, self.forwards, self.backwards, self.steps, self.calls, self.numbers


def fingerprint(words: Sequence[str]) -> int:
    """A positive number, the same for the same words on every rank; 0 for none."""
    return zlib.crc32("\n".join(words).encode()) | 1 if words else 0


def in_words(row: Row, names: Sequence[str], called: str) -> str:
    """Where a rank is whose groups have these ``names``; at WHOLE it has ``called`` something."""
    if row.kind == WHOLE:
        return called
    if row.kind in _WHAT:
        return _WHAT[row.kind]
    return f"the {'parameters' if row.kind in (GATHER, NEAR) else 'gradients'} of {names[row.group]}"
