"""Who owns the files in a disk directory: a process claims its files with locks that die with it.

[Note: claims]
Every file of the disk tier is held under ``flock`` by the process that made it. The kernel drops the lock when that
process ends, however it ends, so "can be locked" means "left by a dead process". A file is removed only by whoever holds its
lock, so under the lock "has a name" is a fact: whoever has just locked a file looks again whether it was removed meanwhile.
A new file that is taken for a dead one between its making and its locking is thus noticed, and another one made.

[Note: strangers]
A directory may be shared: with other users, and with other machines, whose locks this kernel does not see. So a name says
which machine, and which boot of it, made the file; only regular files of exactly such a name, of this machine and boot, and of
this user are ever locked or removed. Nothing is opened through a symbolic link, and a claimed file is used through its
descriptor alone: whoever puts something else in its place changes nothing for us.
"""

import errno
import fcntl
import functools
import hashlib
import os
import re
import stat
from contextlib import suppress
from pathlib import Path

PREFIX = "unwall-"
SUFFIX = ".tier"


@functools.cache
def _machine() -> str:
    """This machine in this boot, in eight letters. See [Note: strangers]."""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()
        return hashlib.sha256(f"{os.uname().nodename} {boot}".encode()).hexdigest()[:8]
    return hashlib.sha256(os.uname().nodename.encode()).hexdigest()[:8]


class Claim:
    """One file that this process owns: created empty and locked, removed by ``release``."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self._descriptor = descriptor
        self._pid = os.getpid()

    @property
    def descriptor(self) -> int:
        """The open file, for as long as it is claimed."""
        if self._descriptor < 0:
            raise RuntimeError(f"{self.path} was released")
        return self._descriptor

    def release(self) -> None:
        """Removes the file, if it still has its name. In a forked child it only lets go of the copy: it is the parent's."""
        if self._descriptor < 0:
            return
        descriptor, self._descriptor = self._descriptor, -1
        try:
            if os.getpid() == self._pid and _is_at(descriptor, self.path):
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
        path = directory / f"{PREFIX}{_machine()}-{os.getpid()}-{rank}-{number}{SUFFIX}"
        number += 1
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        except FileExistsError:  # another tier of this process, or one of the same number in another container
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        except BaseException:  # a file system without locks
            path.unlink(missing_ok=True)
            os.close(descriptor)
            raise
        if _is_at(descriptor, path):
            return Claim(path, descriptor)
        os.close(descriptor)  # see [Note: claims]


def _is_at(descriptor: int, path: Path) -> bool:
    """Whether a path still names this very file."""
    with suppress(OSError):
        mine, there = os.fstat(descriptor), os.lstat(path)
        return (mine.st_dev, mine.st_ino) == (there.st_dev, there.st_ino)
    return False


def _remove_leftovers(directory: Path) -> list[Path]:
    ours = re.compile(rf"{PREFIX}{_machine()}-\d+-\d+-\d+{re.escape(SUFFIX)}")
    found = sorted(path for path in directory.glob(f"{PREFIX}*{SUFFIX}") if ours.fullmatch(path.name))
    return [path for path in found if _remove_if_dead(path)]


def _remove_if_dead(path: Path) -> bool:
    with suppress(OSError):  # gone meanwhile, another user's, a link, or locked because its owner lives
        descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            info = os.fstat(descriptor)
            if not stat.S_ISREG(info.st_mode) or info.st_uid != os.getuid():
                return False
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_at(descriptor, path):  # see [Note: claims]
                path.unlink()
                return True
        finally:
            os.close(descriptor)
    return False
