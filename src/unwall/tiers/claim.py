"""Who owns the files in a disk directory: a process claims its files with locks that die with it.

[Note: claims]
Every file of the disk tier is held under ``flock`` by the process that made it. The kernel drops the lock when that
process ends, however it ends, so "can be locked" means "left by a dead process". A file is removed only by who holds its
lock, so under the lock "has a name" is a fact: whoever has just locked a file looks again whether it was removed meanwhile.
A new file that is taken for a dead one between its making and its locking is thus noticed, and another one made.
"""

import errno
import fcntl
import os
from contextlib import suppress
from pathlib import Path

PREFIX = "unwall-"
SUFFIX = ".tier"


class Claim:
    """One file that this process owns: created empty and locked, removed by ``release``."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self._descriptor = descriptor
        self._pid = os.getpid()

    def release(self) -> None:
        """Removes the file. In a forked child it only lets go of the copy: the file is the parent's."""
        if self._descriptor < 0:
            return
        descriptor, self._descriptor = self._descriptor, -1
        try:
            if os.getpid() == self._pid:
                self.path.unlink(missing_ok=True)
        finally:
            os.close(descriptor)


def claim(directory: Path, rank: int) -> tuple[Claim, list[Path]]:
    """Creates and claims a file in ``directory``; first removes files that dead processes left, and returns their names.

    ValueError or OSError say what is wrong with a directory that is missing, is no directory, or cannot be written.
    """
    if not directory.is_dir():
        what = "is not a directory" if directory.exists() else "does not exist"
        raise ValueError(f"disk directory {directory} {what}: create it or name another one in Plan(disk=...)")
    removed = _remove_leftovers(directory)
    try:
        return _create(directory, rank), removed
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            what = f"disk directory cannot be written ({os.strerror(error.errno)}); name another one in Plan(disk=...)"
            raise PermissionError(error.errno, what, str(directory)) from error
        raise


def _create(directory: Path, rank: int) -> Claim:
    number = 0
    while True:
        path = directory / f"{PREFIX}{os.getpid()}-{rank}-{number}{SUFFIX}"
        number += 1
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        except FileExistsError:  # another tier of this process, or one of the same number in another container
            continue
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        if os.fstat(descriptor).st_nlink:
            return Claim(path, descriptor)
        os.close(descriptor)  # see [Note: claims]


def _remove_leftovers(directory: Path) -> list[Path]:
    return [path for path in sorted(directory.glob(f"{PREFIX}*{SUFFIX}")) if _remove_if_dead(path)]


def _remove_if_dead(path: Path) -> bool:
    with suppress(OSError):  # gone meanwhile, another user's, or locked because its owner lives
        descriptor = os.open(path, os.O_RDWR)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(descriptor).st_nlink:  # see [Note: claims]
                path.unlink()
                return True
        finally:
            os.close(descriptor)
    return False
