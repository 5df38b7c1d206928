"""Where measurements of machines are kept. Without torch: the command looks there before it imports anything."""

import os
from pathlib import Path

NAMES = "machine-{}.json"


def folder() -> Path:
    """Of this user."""
    return Path(os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")) / "unwall"


def any_machine() -> bool:
    """Whether any machine was measured: this one, most likely."""
    return any(folder().glob(NAMES.format("*")))
