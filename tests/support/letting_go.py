"""Waiting until something is gone: a thread in the background may hold it for a moment longer."""

import gc
import time
from collections.abc import Callable


def gone(is_gone: Callable[[], bool], collect: bool = True, limit_s: float = 200.0) -> bool:
    """Whether it goes at last. ``collect``: garbage in cycles, too."""
    end = time.monotonic() + limit_s
    while True:
        if collect:
            gc.collect()
        if is_gone() or time.monotonic() > end:
            return is_gone()
        time.sleep(0.01)
