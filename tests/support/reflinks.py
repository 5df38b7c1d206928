"""File systems that share extents: real ones in an image, where this machine lets us mount it, and a pretended one."""

import contextlib
import errno
import os
import shutil
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from unwall.tiers import clone

KINDS = ["pretended", "xfs", "btrfs"]
_MAKE = {"xfs": ["mkfs.xfs", "-q", "-m", "reflink=1"], "btrfs": ["mkfs.btrfs", "-q"]}


@contextlib.contextmanager
def sharing(kind: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory in which extents are shared. ``pretended``: they are copied, so that the rest is tested everywhere."""
    if kind == "pretended":
        try:
            os.close(os.open(folder, os.O_RDWR | os.O_TMPFILE))
        except OSError as error:
            pytest.skip(f"no file without a name can be made in {folder}: {error.strerror}")
        monkeypatch.setattr(clone.fcntl, "ioctl", copying)
        yield folder
        return
    made, image = folder / kind, folder / f"{kind}.image"
    made.mkdir()
    with image.open("wb") as file:
        file.truncate(2 << 30)
    for command in ([*_MAKE[kind], str(image)], ["mount", "-o", "loop", str(image), str(made)]):
        if shutil.which(command[0]) is None:
            pytest.skip(f"{command[0]} is not installed")
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"{' '.join(command)} is refused: {done.stderr.strip()}")
    # A process of its own unmounts it when our end of the pipe goes: when the test has ended, or we were killed.
    # Lazily: a failed test may have left files open.
    command = ["sh", "-c", 'cat; umount --lazy "$1" && rm "$2"', "sh", str(made), str(image)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True) as keeper:
        yield made
    assert keeper.returncode == 0


def copying(target: int, operation: int, argument: bytes) -> int:
    """``FICLONERANGE`` as a copy, as strict about where extents begin and end."""
    assert operation == clone.FICLONERANGE
    source, start, nbytes, to = struct.unpack("qQQQ", argument)
    if start % 4096 or nbytes % 4096 or to % 4096 or start + nbytes > os.fstat(source).st_size:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
    os.pwrite(target, os.pread(source, nbytes, start), to)
    return 0
