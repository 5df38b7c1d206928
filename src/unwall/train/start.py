"""Where the time from the command to its first step goes."""

import gc
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

PARTS = (
    "imports", "tokenizer", "planning", "measuring", "data", "building", "shard", "weights", "optimizer", "checkpoint",
    "counting", "first batch", "first step",
)  # fmt: skip
"""In the order in which they happen. ``imports``: torch and this package. ``tokenizer``: config and tokenizer, and most of
transformers, which is imported for them. ``measuring``: the machine, where nobody has yet; a process that began with this one
may have done it by then. ``data``: files are opened, the other ranks are met. ``building``: the model without values, and a
look at its files. ``shard``: the tiers get their memory. ``checkpoint``: of a run that goes on. ``counting``: what is left of
it when the model is there. ``first batch``: of samples, and of all ranks."""


def process_age_s() -> float:
    """Seconds since this process began: what was imported before anyone could look at a clock. 0 where nobody says."""
    try:
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError, AttributeError):
        return 0.0
    return max(0.0, age)


@contextmanager
def without_collector() -> Iterator[None]:
    """Python's garbage collector waits. torch and transformers make a million objects when they are imported, none of them
    garbage: looking through them again and again takes a tenth of the time."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


class Start:
    """A stopwatch of one start. ``before_s``: what had passed when it was made."""

    def __init__(self, before_s: float = 0.0) -> None:
        self.seconds = {"imports": before_s}
        self._at = time.perf_counter()

    def lap(self, part: str) -> None:
        """What has passed since the last lap went to this part."""
        now = time.perf_counter()
        self.seconds[part] = self.seconds.get(part, 0.0) + now - self._at
        self._at = now

    def line(self, step: int) -> dict[str, Any]:
        """For the log: ``step`` is the one that the run goes on behind."""
        parts = {part: round(seconds, 3) for part, seconds in self.seconds.items()}
        return {"kind": "start", "step": step, "seconds": round(sum(self.seconds.values()), 3), "parts": parts}

    def __str__(self) -> str:
        """``first step after 12.3 s: imports 4.1, planning 0.6, ...``: what took a twentieth of a second or more."""
        total = sum(self.seconds.values())
        long = ", ".join(f"{part} {seconds:.1f}" for part, seconds in self.seconds.items() if seconds >= 0.05)
        return f"first step after {total:.1f} s: {long}"
