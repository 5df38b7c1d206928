"""What the command says, and where: standard output and error, a terminal or a file."""

import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TextIO

import typer

if TYPE_CHECKING:
    from unwall.planner.probe import Progress


def open_streams() -> None:
    """A command that was started with a closed output (``>&-``) has None there: nobody listens, and it works all the same."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115 - as long as the process


def say(text: object, *, error: bool = False) -> None:
    """A line of a run, on standard output or error. Whoever read along may leave (``| head``): the run goes on."""
    stream = sys.stderr if error else sys.stdout
    try:
        print(text, file=stream, flush=True)
    except BrokenPipeError:
        nobody_listens(stream)


def nobody_listens(stream: TextIO) -> None:
    """What is written to it from now on, and what it still holds, goes nowhere."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


def console() -> Any:
    """For tables: as wide as the terminal, or 120 columns."""
    from rich.console import Console

    return Console(highlight=False, width=None if sys.stdout.isatty() else 120)


@contextmanager
def said_plainly() -> Iterator[None]:
    """An error that a user can mend becomes one line without a stack trace: exit code 2, or 1 where the
    answer is no (nothing fits)."""
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:  # `unwall plan ... | head`: whoever read has seen enough
        nobody_listens(sys.stdout)
        raise typer.Exit(code=0) from None
    except (ValueError, RuntimeError, OSError) as error:
        said = str(error)
        if isinstance(error, OSError) and said.startswith("[Errno") and error.filename:
            said = f"{os.fsdecode(error.filename)}: {error.strerror}"
        options = re.sub(r"\b(device|host|disk)_bytes='([^']*)'", r"--\1-bytes \2", said)
        typer.echo(f"unwall: {options}", err=True)
        refused = type(error).__name__ == "DoesNotFitError"
        raise typer.Exit(code=1 if refused else 2) from None


@contextmanager
def progress() -> "Iterator[Progress | None]":
    """Says on standard error that the machine is measured: a bar on a terminal, a line elsewhere. Nothing where it is not."""
    from rich.console import Console
    from rich.progress import Progress as Bar

    bar = Bar(console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty())
    task = bar.add_task("measuring this machine, once", total=None)

    def told(name: str, done: int, total: int) -> None:
        if done == 0 and bar.disable:
            typer.echo("measuring this machine, once: half a minute or less", err=True)
        if done == 0:
            bar.start()
        bar.update(task, description=f"measuring this machine, once: {name}", completed=done, total=total)
        if done == total:  # what comes next has lines of its own
            bar.stop()

    try:
        yield told
    finally:
        bar.stop()
