"""Processes of this machine, as the kernel sees them: whether a rank that does not answer is slow, stopped or dead."""

import contextlib
import functools
import os
from pathlib import Path
from typing import NamedTuple

_EXITING = 0x4
"""The kernel's PF_EXITING, of a process's flags."""


class Process(NamedTuple):
    """Where a rank runs."""

    machine: str
    pid: int
    began: str
    """When, as the kernel counts: a later process of the same number is another one."""


def look_up(pid: int) -> tuple[str, str]:
    """A process's state, as one letter, and when it began; both empty where there is none."""
    with contextlib.suppress(OSError):
        return state_of(Path(f"/proc/{pid}/stat").read_text())
    return "", ""


def state_of(stat: str) -> tuple[str, str]:
    """The same, from what the kernel says. One that has begun to end counts as dead: its connections are closed by then, but
    giving back the memory of an accelerator takes seconds."""
    fields = stat.rpartition(")")[2].split()
    if len(fields) < 20:
        return "", ""
    return "X" if int(fields[6]) & _EXITING else fields[0], fields[19]


@functools.cache
def machine_name() -> str:
    """This machine in this boot, as far as its processes see each other. No spaces."""
    boot = namespace = ""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespace = str(Path("/proc/self/ns/pid").readlink())
    return f"{os.uname().nodename}/{boot}/{namespace}"
