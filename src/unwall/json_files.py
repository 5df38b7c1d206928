"""JSON files that people write: whatever is in them, the error is one sentence that names the file."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any


def read_json(path: Path, error: type[ValueError], pairs: Callable[[list[tuple[str, Any]]], Any] | None = None) -> Any:
    """The content of a JSON file. ``error`` is raised where it cannot be read. ``pairs`` as json's ``object_pairs_hook``."""
    try:
        return json.loads(path.read_text(encoding="utf-8-sig"), object_pairs_hook=pairs)
    except OSError as problem:
        raise error(f"{path}: cannot be read: {problem.strerror or problem}") from problem
    except RecursionError:
        raise error(f"{path}: is nested too deeply to be read") from None
    except error:
        raise
    except ValueError as problem:  # UnicodeDecodeError is one, too
        raise error(f"{path}: is not JSON: {problem}") from problem
