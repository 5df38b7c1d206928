"""The machine is measured by a process of its own while this one imports torch and transformers.

Only where nothing is remembered, and where there are so many cores that ranks which import change little of what is measured.
Nor with a disk, which weights are read from at the same time. Whatever becomes of that process, ``probe`` has the last word: it
finds the measurements remembered, or measures.
"""

import contextlib
import ctypes
import functools
import os
import signal
import subprocess
import sys
from collections.abc import Callable

from unwall.planner.remembered import any_machine
from unwall.train.options import Options

CORES = 8
"""Per rank of this machine: all of them import at the same time."""
LIMIT_S = 90.0
"""A measurement takes a few seconds, and an import of torch."""
_PDEATHSIG = 1
_CODE = "import torch; from unwall.planner.probe import probe; probe(dtypes=(torch.bfloat16,))"
_started: "subprocess.Popen[bytes] | None" = None


def measure_beside(options: Options) -> bool:
    """Starts that process, where it pays. Whether it did."""
    global _started
    alone = options.plan == "auto" and options.disk is None and os.environ.get("RANK", "0") == "0"
    ranks = os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("WORLD_SIZE", "1"))
    if not alone or not ranks.isdigit() or len(os.sched_getaffinity(0)) < CORES * int(ranks) or any_machine():
        return False
    # Whoever ends the command ends its measurement. Loaded here: between fork and exec the loader may be locked for good.
    follow_parent = functools.partial(ctypes.CDLL(None).prctl, _PDEATHSIG, signal.SIGKILL)
    with contextlib.suppress(OSError):
        _started = subprocess.Popen(
            [sys.executable, "-P", "-c", _CODE], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            preexec_fn=follow_parent,
        )  # fmt: skip
    return _started is not None


def outwait_measuring(progress: Callable[[str, int, int], None] | None) -> None:
    """Until it has measured, or has failed to."""
    global _started
    process, _started = _started, None
    if process is None:
        return
    if progress is not None and process.poll() is None:
        progress("all of it", 0, 1)
    try:
        process.wait(LIMIT_S)
    except subprocess.TimeoutExpired:
        pass
    finally:
        _end(process)
    if progress is not None:
        progress("done", 1, 1)


def end_measuring() -> None:
    """The command ends, and nobody has asked for the measurement."""
    global _started
    process, _started = _started, None
    if process is not None:
        _end(process)


def _end(process: "subprocess.Popen[bytes]") -> None:
    process.kill()
    process.wait()
