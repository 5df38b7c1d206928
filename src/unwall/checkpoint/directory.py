"""The directory of a training's checkpoints: numbered ones, the newest complete one, and what dead processes left.

[Note: complete or not there]
A checkpoint is complete when its manifest is there, which is renamed into place last. One without belongs to a save that is
under way, or to a process that died. The difference is a lock (``flock``) on a file in it: the kernel drops it when its owner
ends, however it ends. Making, looking at and removing checkpoints in the making is done under a lock of the whole directory.

[Note: removal]
To give the bytes of a large file back takes a drive about as long as to write a good part of it. So an old checkpoint only
loses its manifest and its name while somebody waits; a thread removes the rest. The next save waits for that thread, because it
needs the room. What is left of a process that died meanwhile goes with other partial ones.
"""

import contextlib
import errno
import fcntl
import os
import re
import shutil
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path

from unwall.checkpoint.errors import CheckpointError
from unwall.checkpoint.foreign import foreign
from unwall.checkpoint.manifest import MANIFEST

_NAME = re.compile(r"checkpoint-(\d{6,})")
_LOCK, _WRITING = ".lock", "writing"
_REMOVED = ".removed-"
_PARTIAL = f"{MANIFEST}.partial"
_OURS = re.compile(rf"{_WRITING}|{re.escape(_PARTIAL)}|rank-\d{{5,}}\.safetensors")
"""What a save writes before its manifest."""


def complete(directory: str | Path) -> list[Path]:
    """The complete checkpoints of a directory, the oldest first."""
    return [path for path in _numbered(Path(directory)) if (path / MANIFEST).is_file()]


def find(path: str | Path) -> Path:
    """The checkpoint that ``path`` means: itself, or the newest complete one in it. FileNotFoundError where there is none,
    CheckpointError where another program wrote one."""
    path = Path(path)
    if (path / MANIFEST).is_file():
        return path
    found = complete(path)
    if not found:
        sentence = foreign(path)
        if sentence is not None:
            raise CheckpointError(sentence)
        left = len(_numbered(path)) if path.is_dir() else 0
        what = " (no such directory)" if not path.is_dir() else f" ({left} that are not complete)" if left else ""
        if not what and any(path.glob("*.safetensors")):
            what = " (it has weights: unwall.load_weights takes them)"
        raise FileNotFoundError(f"{path} has no complete checkpoint in it{what}")
    return found[-1]


class Claimed:
    """A checkpoint in the making, which is this process's. It ends as ``finish`` or as ``discard``."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self._descriptor: int | None = descriptor

    def finish(self, manifest: bytes) -> None:
        """Everything else is on the disk: from now on the checkpoint exists."""
        partial = self.path / _PARTIAL
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
        view = memoryview(manifest)
        try:
            while view:
                view = view[os.write(descriptor, view) :]
            os.fsync(descriptor)
        except OSError as error:
            missing = len(view) or len(manifest)
            what = f"{error.strerror}: {missing} bytes of {len(manifest)} are missing"
            raise OSError(error.errno, what, str(partial)) from error
        finally:
            os.close(descriptor)
        sync_directory(self.path)
        os.rename(partial, self.path / MANIFEST)
        sync_directory(self.path)
        sync_directory(self.path.parent)
        (self.path / _WRITING).unlink(missing_ok=True)
        self._let_go()

    def discard(self) -> str | None:
        """The save failed: nothing is left of it. Its manifest goes first, if it was there by then: none is ever half there.
        Gives what is to be said where that fails, too."""
        there, complete = True, False
        with contextlib.suppress(OSError), _locked(self.path.parent):
            (self.path / MANIFEST).unlink(missing_ok=True)
            shutil.rmtree(self.path, ignore_errors=True)
        with contextlib.suppress(OSError):
            there, complete = self.path.exists(), (self.path / MANIFEST).exists()
        self._let_go()
        if not there:
            return None
        after = "it looks complete: remove it before the next load" if complete else "no load sees it, the next save removes it"
        return f"{self.path} of the save that failed could not be removed: {after}"

    def _let_go(self) -> None:
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            _unlock(descriptor)


def claim(directory: str | Path) -> Claimed:
    """Makes the next checkpoint of a directory, and removes what dead processes left there."""
    directory = Path(directory)
    if (directory / MANIFEST).exists():
        raise ValueError(f"{directory} is a checkpoint: save into the directory that holds it, {directory.parent}")
    _make(directory)
    finish_removals()
    with _locked(directory):
        _remove_partial(directory)
        last = max((_number(path) for path in _named(directory)), default=0)
        path = directory / f"checkpoint-{last + 1:06d}"
        path.mkdir()
        descriptor = os.open(path / _WRITING, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        _flock(descriptor, path)
    return Claimed(path, descriptor)


def remove_old(directory: str | Path, keep: int) -> None:
    """Removes all complete checkpoints but the newest ``keep``. The manifest goes first: none is ever half there. One that
    cannot be removed is warned of, and does not keep the others. What a symbolic link leads to is not ours to remove."""
    removed = []
    with _locked(Path(directory)):
        for path in complete(directory)[:-keep]:
            if path.is_symlink():
                continue
            try:
                (path / MANIFEST).unlink()
                sync_directory(path)
                removed.append(path.rename(path.with_name(f"{_REMOVED}{path.name}")))
            except OSError as error:
                warnings.warn(f"the old checkpoint {path} cannot be removed: {error}", RuntimeWarning, stacklevel=2)
    if removed:
        _remove_beside(removed)


_removing: set[threading.Thread] = set()


def _remove_beside(paths: list[Path]) -> None:
    """See [Note: removal]. Not a daemon: a script that ends after its last save leaves nothing behind."""

    def remove() -> None:
        for path in paths:
            shutil.rmtree(path, ignore_errors=True)
        _removing.discard(threading.current_thread())

    thread = threading.Thread(target=remove, name="unwall removes checkpoints", daemon=False)
    _removing.add(thread)
    thread.start()


def finish_removals() -> None:
    """What was removed has given its bytes back."""
    for thread in list(_removing):
        thread.join()


def sync_directory(path: Path) -> None:
    """The names in a directory are on the disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS):  # file systems that have no such thing
            raise
    finally:
        os.close(descriptor)


def _remove_partial(directory: Path) -> None:
    """See [Note: complete or not there]. What has a checkpoint's name but holds anything else than a save writes is another
    program's (trainers, too, number their checkpoints): it stays."""
    for path in directory.glob(f"{_REMOVED}checkpoint-*"):
        shutil.rmtree(path, ignore_errors=True)
    for path in _numbered(directory):
        if path.is_symlink() or (path / MANIFEST).exists() or not _is_ours(path):
            continue
        try:
            descriptor = os.open(path / _WRITING, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:
            shutil.rmtree(path, ignore_errors=True)  # half made, or half removed
            continue
        except OSError:  # of another user
            continue
        with contextlib.suppress(BlockingIOError):
            if _flock(descriptor, path, fcntl.LOCK_NB):  # without locks nobody knows whether its owner lives
                shutil.rmtree(path, ignore_errors=True)
        os.close(descriptor)


def _is_ours(path: Path) -> bool:
    """Whether nothing is in it but what a save writes."""
    try:
        return all(_OURS.fullmatch(name) for name in os.listdir(path))
    except OSError:
        return False


@contextlib.contextmanager
def _locked(directory: Path) -> Iterator[None]:
    descriptor = os.open(directory / _LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
    try:
        _flock(descriptor, directory)
        yield
    finally:
        _unlock(descriptor)


def _flock(descriptor: int, path: Path, more: int = 0) -> bool:
    """Locks a file. False, with a warning, where the file system has no locks (Lustre, unless it is mounted with them)."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | more)
    except OSError as error:
        if error.errno not in (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK):
            raise
        warnings.warn(
            f"the file system of {path} has no locks (flock: {error.strerror}): let no two processes save there at once, "
            "and remove what killed ones leave (checkpoints without a manifest) yourself",
            RuntimeWarning,
            stacklevel=2,
        )
        return False
    return True


def _unlock(descriptor: int) -> None:
    """And closes. A process that was forked meanwhile (a worker of a data loader) has the descriptor, too, and would keep the
    lock for as long as it runs: so it is given back in so many words."""
    with contextlib.suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_UN)
    os.close(descriptor)


def _make(directory: Path) -> None:
    """The directory with all its parents, their names on the disk."""
    new = [path for path in (directory, *directory.parents) if not path.exists()]
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        what = "a link that leads nowhere" if directory.is_symlink() else "no directory"
        raise type(error)(error.errno, f"checkpoints go into a directory; this is {what}", str(directory)) from error
    for path in new:
        with contextlib.suppress(OSError):  # one that may be written to, but not read
            sync_directory(path.parent)


def _named(directory: Path) -> list[Path]:
    """Whatever has a checkpoint's name: its number is taken."""
    return [path for path in directory.iterdir() if _NAME.fullmatch(path.name)]


def _numbered(directory: Path) -> list[Path]:
    """The checkpoints of a directory, complete or not, in the order of their numbers. Also those that were moved elsewhere
    and left a symbolic link in their place."""
    if not directory.is_dir():
        return []
    return sorted((path for path in _named(directory) if path.is_dir()), key=_number)


def _number(path: Path) -> int:
    matched = _NAME.fullmatch(path.name)
    assert matched is not None
    return int(matched[1])
