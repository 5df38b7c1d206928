"""What a rank announces when the ranks agree on what comes next. See [Note: agreement] in schedule/agreement.py."""

from collections.abc import Sequence
from typing import NamedTuple

from unwall.schedule.script import GATHER, REDUCE, SUM, Op

END_FORWARD, END_BACKWARD, STEP, WHOLE = 11, 12, 13, 14
"""Meetings. WHOLE: ``state_dict`` and the like, which all ranks call at once."""
_WHAT = {
    SUM: "the norm of the gradients",
    END_FORWARD: "the end of a forward",
    END_BACKWARD: "the end of a backward",
    STEP: "a step",
    WHOLE: "state_dict, load_state_dict or full_params",
}
DEVIATED, PENDING = 1, 2
"""Flags: it contributed something else than its script says; it keeps gradients that were not reduced."""


class Row(NamedTuple):
    """What a rank announces."""

    model: int
    kind: int
    group: int
    forwards: int
    backwards: int
    steps: int
    script: int
    """At a meeting: the fingerprint of what it expects until the next one, 0 where it expects nothing."""
    flags: int

    @property
    def op(self) -> Op | None:
        return Op(self.kind, self.group) if self.kind in (GATHER, REDUCE, SUM) else None

    def what(self, model: int, names: Sequence[str]) -> str:
        """In words, for a rank of ``model`` whose groups have these ``names``."""
        if self.model != model:
            return "another sharded model"
        if self.kind in _WHAT:
            return _WHAT[self.kind]
        return f"the {'parameters' if self.kind == GATHER else 'gradients'} of {names[self.group]}"
