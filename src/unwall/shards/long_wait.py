"""A wait for other ranks that lasts.

[Note: long waits]
A rank whose process has ended is noticed at once, and one that has failed tells so itself (shards/watch.py). Two others say
nothing. The script of one has come to its end (``sys.exit`` in the middle of an epoch) while its process stays, for a thread
that does not end: it will not come, and that is an error. Another one is stopped, or busy with something else: it may yet come,
so whoever waits goes on waiting, up to the time-out of the process group, and says for whom.
"""

import contextlib
import time
import warnings

from unwall.shards.looking import LOOK_S
from unwall.shards.watch import Watch

LEFT_S = 5.0
"""After this time a wait for a rank that has left its script is in vain: what that rank had sent has long been there."""
STOPPED_S = 5.0
"""After this time it is said that a rank is stopped."""
SLOW_S = 60.0
"""After this time it is said where all ranks are, once."""


class LongWait:
    """One that did not end within ``LOOK_S``. See [Note: long waits]."""

    def __init__(self, watch: Watch, rank: int, where: str) -> None:
        self._watch = watch
        self._rank = rank
        self._where = where
        self._stopped_told = False
        watch.waits_since = self._began = time.monotonic() - LOOK_S

    def look(self) -> str:
        """Why it is in vain, if that is known. Warns of what may yet change."""
        waited_s = time.monotonic() - self._began
        if waited_s >= LEFT_S and (left := self._watch.left()):
            return f"{left} has come to the end of its script"
        if waited_s >= STOPPED_S and not self._stopped_told and (stopped := self._watch.stopped()):
            self._stopped_told = True
            self._warn(waited_s, stopped)
        if waited_s >= SLOW_S and not self._watch.slow_told:
            self._watch.slow_told = True
            self._warn(waited_s, self._watch.describe_others())
        return ""

    def over(self) -> None:
        """However it ended."""
        self._watch.waits_since = None

    def _warn(self, waited_s: float, others: str) -> None:
        text = f"rank {self._rank} has been waiting for {waited_s:.0f} s at {self._where}, and goes on waiting: {others}"
        with contextlib.suppress(RuntimeWarning):  # where warnings are errors: the wait must not end half way
            warnings.warn(text, RuntimeWarning, stacklevel=4)
