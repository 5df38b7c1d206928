"""One piece of work on a time line. Whoever draws it needs no torch."""

from typing import NamedTuple


class LaneSpan(NamedTuple):
    """Work on a lane, in seconds of the monotonic clock."""

    lane: str
    label: str
    start: float
    end: float
