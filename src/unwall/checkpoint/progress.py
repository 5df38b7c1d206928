"""A bar for what takes long: bytes, rate and time left, on a terminal and on the first rank only."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Advance = Callable[[int], None]
"""Told how many bytes were done since the last call."""


def _nothing(nbytes: int) -> None:
    """Where nobody watches."""


@contextmanager
def progress(what: str, total_bytes: int, rank: int = 0) -> Iterator[Advance]:
    """Inside, the bar is shown and moved by what is yielded. It goes when the work is done."""
    if rank != 0 or total_bytes == 0 or not sys.stderr.isatty():
        yield _nothing
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=total_bytes)
        yield lambda nbytes: bar.update(task, advance=nbytes)
