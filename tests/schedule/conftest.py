"""The rank processes and the reference of the engine tests, for tests of what the ranks do together."""

import importlib.util
import sys
from pathlib import Path

ENGINE = Path(__file__).parents[1] / "engine"
sys.path.append(str(ENGINE))  # the rank processes take it over

_spec = importlib.util.spec_from_file_location("engine_fixtures", ENGINE / "conftest.py")
_fixtures = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_fixtures)
ranks, one_thread = _fixtures.ranks, _fixtures.one_thread
