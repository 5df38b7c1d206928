"""What the user watches: one line that changes on a terminal, plain lines elsewhere."""

import sys
import time
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.text import Text

from unwall.terminal import nobody_listens
from unwall.tiers.sizes import format_bytes

PLAIN_EVERY_S = 5.0
"""Not on a terminal: a line at most so often, beside the first and the last."""


class _Console(Console):
    """Whoever read along may leave (``| head``): the run goes on, and ``log.jsonl`` with it."""

    def on_broken_pipe(self) -> None:
        self.quiet = True
        nobody_listens(sys.stdout)


class LiveLine:
    """Rank 0's. The other ranks have one that says nothing."""

    def __init__(self, steps: int, *, silent: bool) -> None:
        self._steps = steps
        self._silent = silent
        self._console = _Console(highlight=False, soft_wrap=True)
        self._live: Live | None = None
        self._last = float("-inf")
        self._pace: float | None = None
        if not silent and sys.stdout.isatty():
            self._live = Live(Text("loading"), console=self._console, refresh_per_second=4, transient=True)
            self._live.start()

    def show(self, line: dict[str, Any]) -> None:
        """A line of the log."""
        if self._silent:
            return
        if line["kind"] == "eval":
            self.say(f"step {line['step']}: eval loss {line['loss']:.4f}, perplexity {line['perplexity']:.4g}")
            return
        if not line.get("profiled"):
            self._pace = line["seconds"] if self._pace is None else 0.9 * self._pace + 0.1 * line["seconds"]
        text = status(line, self._steps, self._pace)
        if self._live is not None:
            self._live.update(Text(text, no_wrap=True, overflow="ellipsis"))
            return
        now = time.monotonic()
        if now - self._last >= PLAIN_EVERY_S or line["step"] in (1, self._steps):
            self._last = now
            self.say(text)

    def say(self, text: str) -> None:
        """A line that stays."""
        if not self._silent:
            self._console.print(text, markup=False)
            sys.stdout.flush()

    def close(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None


def status(line: dict[str, Any], steps: int, pace: float | None) -> str:
    """``step 12/100  loss 2.3145  5,120 tokens/s  83% of the bound  device 11.2 GiB, host 96.0 GiB  3:05 left``."""
    parts = [f"step {line['step']}/{steps}", f"loss {line['loss']:.4f}"]
    if line.get("skipped"):
        parts.append("(skipped: not finite)")
    parts.append(f"{line['tokens_per_second']:,.0f} tokens/s")
    if line.get("bound_fraction") is not None:
        parts.append(f"{100 * line['bound_fraction']:.0f}% of the bound")
    parts.append(", ".join(f"{tier} {format_bytes(nbytes)}" for tier, nbytes in line["live_bytes"].items() if nbytes))
    if pace is not None:
        parts.append(f"{_clock((steps - line['step']) * pace)} left")
    return "  ".join(parts)


def _clock(seconds: float) -> str:
    minutes, rest = divmod(int(seconds + 0.5), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
