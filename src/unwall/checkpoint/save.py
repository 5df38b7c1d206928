"""``unwall.save``."""

import atexit
import datetime
import errno
import itertools
import os
import sys
import threading
import time
import weakref
from pathlib import Path
from typing import Any

import torch
from torch import nn

from unwall._version import __version__
from unwall.checkpoint.contents import Contents, Small, make_contents, take_small
from unwall.checkpoint.directory import Claimed, claim
from unwall.checkpoint.errors import CheckpointError
from unwall.checkpoint.meeting import Meeting
from unwall.checkpoint.model_card import describe_model
from unwall.checkpoint.names import Names, names_of
from unwall.checkpoint.snapshot import Loans
from unwall.checkpoint.trained import Optimizers, Trained, check_optimizers
from unwall.checkpoint.writing import Save
from unwall.runtime.engine import Engine
from unwall.tiers.sizes import format_bytes

WAIT_POLL_S = 0.1
"""How often a wait for a save looks whether it was interrupted."""


class PendingSave:
    """A save that goes on beside training. What it failed with is raised by ``wait``, or by the next save or load."""

    def __init__(self, save: Save, loans: Loans, keep: tuple[Any, ...]) -> None:
        self.path = save.directory
        """The checkpoint, once it is complete."""
        self._number = next(_numbers)
        self._error: BaseException | None = None
        self._failure: str | None = None
        self._keep: tuple[Any, ...] = keep  # an optimizer that went would take its states along
        self._ended = threading.Event()
        # Not a daemon: a script that ends after its last save ends when that is written.
        thread = threading.Thread(target=self._run, args=(save, loans), name="unwall save", daemon=False)
        try:
            thread.start()
        except BaseException:
            loans.end_all()
            raise

    def _run(self, save: Save, loans: Loans) -> None:
        try:
            save.run(loans)
        except BaseException as error:
            self._error = error
            self._failure = f"{self.path} was not saved: {type(error).__name__}: {error}"
            _unheard[self._number] = self._failure
        finally:
            self._keep = ()
            self._ended.set()

    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return self._ended.is_set()

    def wait(self, timeout: float | None = None) -> Path:
        """The checkpoint's path, once it is complete. Raises what the save failed with: a CheckpointError where that was
        raised before, here or by the next save or load."""
        error = self.ended_with(timeout)
        if error is not None:
            raise error
        if self._failure is not None:
            raise CheckpointError(self._failure)
        return self.path

    def ended_with(self, timeout: float | None = None) -> BaseException | None:
        """Waits. Gives what the save failed with, once: the error holds on to what the save was about."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while not self._ended.wait(WAIT_POLL_S):
            if deadline is not None and time.monotonic() >= deadline:
                raise TimeoutError(f"{self.path} is not written after {timeout} s")
        error, self._error = self._error, None
        _unheard.pop(self._number, None)
        return error


_numbers = itertools.count()
_unheard: dict[int, str] = {}
"""What saves beside training have failed with, by their numbers, until somebody is told."""


@atexit.register
def _say_what_nobody_heard() -> None:
    """A program that ends with a save has no further occasion to be told of its failure. All saves have ended by now."""
    for text in _unheard.values():
        print(f"unwall: {text}", file=sys.stderr)
    _unheard.clear()


_pending: "weakref.WeakKeyDictionary[Engine, PendingSave]" = weakref.WeakKeyDictionary()


def finish_pending(engine: Engine) -> BaseException | None:
    """Waits for a save of this model that goes on beside training. Gives what it failed with, unless someone was told."""
    pending = _pending.get(engine)
    if pending is None:
        return None
    try:
        error = pending.ended_with()
    except BaseException as interrupt:  # the other ranks are told of it; the save goes on, and is waited for the next time
        return interrupt
    _pending.pop(engine, None)
    return error


def begin(engine: Engine, what: str) -> Meeting:
    """What every save and load does first, with all ranks: the save before it has ended, and raises what it failed with."""
    error = finish_pending(engine)
    engine.executor.together(what)
    meeting = Meeting(engine.everyone)
    meeting.agree(error)
    return meeting


def save_engine(
    path: str | os.PathLike[str],
    engine: Engine,
    model: nn.Module,
    optimizers: Optimizers,
    extra: Any,
    keep: int | None,
    block: bool,
) -> "Path | PendingSave":
    """See ``unwall.save``."""
    if keep is not None and (not isinstance(keep, int) or isinstance(keep, bool) or keep < 1):
        raise ValueError(f"keep is how many checkpoints stay, 1 or more, or None for all of them, got {keep!r}")
    meeting = begin(engine, "save")
    # Beside training the program may go to another directory.
    save, contents = _prepare(Path(path) if block else Path(path).absolute(), engine, meeting, model, optimizers, extra, keep)
    if block:
        save.run()
        return save.directory
    if engine.device.device.type == "cuda":
        torch.cuda.synchronize(engine.device.device)  # what was queued has changed the states by now
    loans = Loans(contents.lots, engine.tiers.disk, contents.nbytes)
    pending = _pending[engine] = PendingSave(save, loans, (model, optimizers))
    return pending


def _prepare(
    path: Path,
    engine: Engine,
    meeting: Meeting,
    model: nn.Module,
    optimizers: Optimizers,
    extra: Any,
    keep: int | None,
) -> tuple[Save, Contents]:
    """Everything up to the first byte. What fails on one rank fails on all, and leaves nothing."""
    error: BaseException | None = None
    names: Names | None = None
    small: Small | None = None
    claimed: Claimed | None = None
    trained: Trained = {}
    try:
        names = names_of(model, engine)
        trained = check_optimizers(optimizers, engine)
        if engine.lent:
            raise RuntimeError("unwall.save inside unwall.full_params: leave the context first")
        if engine.averaged and trained:
            raise RuntimeError(
                "unwall.save with an optimizer inside ema.swap() would resume training from the averages: leave the context "
                "first, or write the averages alone with unwall.export_weights"
            )
        engine.finish()
        small = take_small(engine, names, trained, extra)
        claimed = claim(path) if meeting.rank == 0 else None
    except BaseException as failure:
        error = failure
    try:
        opened = (None if small is None else small.digests(), None if claimed is None else str(claimed.path))
        answers = meeting.agree(error, opened)
        assert names is not None
        assert small is not None
        directory = Path(answers[0][1])
        contents = _contents(engine, model, meeting, names, trained, small, [digests for digests, _ in answers], directory)
    except BaseException:
        if claimed is not None:
            claimed.discard()
        raise
    return Save(engine, meeting, contents, directory, claimed, keep), contents


def _contents(
    engine: Engine,
    model: nn.Module,
    meeting: Meeting,
    names: Names,
    optimizers: Trained,
    small: Small,
    digests: list[dict[str, Any]],
    directory: Path,
) -> Contents:
    """What this rank writes. OSError, before anything is written, where there is no room for it."""
    error: BaseException | None = None
    contents: Contents | None = None
    try:
        notes = {
            "saved_at": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "versions": {"unwall": __version__, "torch": str(torch.__version__)},
            "model": describe_model(model),
        }
        _check_options(digests)
        contents = make_contents(engine, names, optimizers, small, digests, notes)
        if not directory.is_dir():
            raise CheckpointError(f"rank {meeting.rank} does not see {directory}: all ranks save into one directory")
    except BaseException as failure:
        error = failure
    sizes = meeting.agree(error, None if contents is None else contents.nbytes)
    if meeting.rank == 0:
        error = _shortage(directory, sum(sizes))
    meeting.agree(error)
    assert contents is not None
    return contents


def _check_options(digests: list[dict[str, Any]]) -> None:
    """CheckpointError where ranks train with other options: those of rank 0 would count for all."""
    for rank, theirs in enumerate(digests):
        if theirs["optimizer"] != digests[0]["optimizer"]:
            raise CheckpointError(
                f"rank {rank} has the optimizer {theirs['optimizer']}, rank 0 {digests[0]['optimizer']}: all ranks need the "
                "same number of param groups with the same options (in a pipeline a group may be empty)"
            )


def _shortage(directory: Path, nbytes: int) -> OSError | None:
    """What is to be said where the drive has no room for that much."""
    drive = os.statvfs(directory)
    missing = nbytes - drive.f_bavail * drive.f_frsize
    if missing <= 0:
        return None
    what = f"{format_bytes(missing)} ({missing} bytes) are missing: the checkpoint takes {format_bytes(nbytes)}"
    return OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)}: {what}", str(directory))
