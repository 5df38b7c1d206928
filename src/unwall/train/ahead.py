"""What can begin while torch is imported: weights on their way into memory, and measuring the machine."""

import contextlib
import os
import threading
from pathlib import Path

from unwall.train.measuring import measure_beside
from unwall.train.options import Options

SHARE = 4
"""Files larger than this part of the memory that is free are left alone: states will need it."""
_PIECE_BYTES = 16 << 20


def begin_ahead(options: Options) -> None:
    """Both, where they are needed."""
    measure_beside(options)
    read_ahead(options)


def read_ahead(options: Options) -> threading.Thread | None:
    """Asks the kernel for the files that ``load_weights`` will read. None where there is nothing to read, or no room."""
    goes_on = not options.lora and any(Path(options.out, "checkpoints").glob("*"))
    files = [] if goes_on else sorted(Path(options.model).glob("*.safetensors"))
    with contextlib.suppress(OSError):
        if files and sum(path.stat().st_size for path in files) <= _free_bytes() // SHARE:
            found = threading.Thread(target=_ask, args=(files,), name="unwall read ahead", daemon=True)
            found.start()
            return found
    return None


def _ask(files: list[Path]) -> None:
    for path in files:
        with contextlib.suppress(OSError), path.open("rb") as file:
            for start in range(0, os.fstat(file.fileno()).st_size, _PIECE_BYTES):
                os.posix_fadvise(file.fileno(), start, _PIECE_BYTES, os.POSIX_FADV_WILLNEED)


def _free_bytes() -> int:
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:")), 0)
