"""What people expect of an installed package: a version in one place, ``python -m unwall``, types, a licence."""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

from typer.testing import CliRunner

import unwall
from unwall.cli import app

ROOT = Path(__file__).parent.parent
SOURCES = Path(unwall.__file__).parent


def test_the_version_is_written_once_and_pyproject_reads_it_from_there():
    described = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert "version" not in described["project"]
    (source,) = [entry["input"] for entry in described["tool"]["dynamic-metadata"] if entry["field"] == "version"]
    assert f'__version__ = "{unwall.__version__}"' in (ROOT / source).read_text()
    assert re.fullmatch(r"\d+\.\d+\.\d+", unwall.__version__)


def test_the_command_by_its_module_where_nothing_is_installed(tmp_path):
    """Run elsewhere, with the sources on the path alone."""
    command = [sys.executable, "-m", "unwall", "--version"]
    environment = os.environ | {"PYTHONPATH": str(SOURCES.parent)}
    found = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
    assert found.stdout == f"unwall {unwall.__version__}\n"


def test_the_command_says_its_options_without_torch_and_every_name_is_there():
    """torch takes seconds to import; a program that imports it later finds everything all the same."""
    code = """if True:
        import sys, unwall.cli
        from typer.testing import CliRunner
        for given in (["--help"], ["train", "--help"], ["plan"], ["train", "--model", "x", "--data", "y", "--out", "z", "--seq", "0"]):
            CliRunner().invoke(unwall.cli.app, given)
        import unwall.report.page
        assert set(unwall.__all__) <= set(dir(unwall)) and "torch" not in sys.modules
        import torch
        with torch.inference_mode(), torch.device("meta"):  # the first use may be anywhere
            assert unwall.shard
        found = [value for name, module in sys.modules.items() if name.startswith("unwall.") for value in vars(module).values()]
        assert not any(value.is_inference() or value.is_meta for value in found if isinstance(value, torch.Tensor))
        assert [name for name in unwall.__all__ if not hasattr(unwall, name)] == []
        print(unwall.runtime.__name__, hasattr(unwall, "no_such_name"))
    """
    environment = os.environ | {"PYTHONPATH": str(SOURCES.parent)}
    found = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert found.stdout == "unwall.runtime False\n", found.stderr


def test_no_arguments_are_help_and_an_unknown_command_is_an_error():
    shown = CliRunner().invoke(app, [])
    assert shown.exit_code == 0
    assert all(command in shown.output for command in ("demo", "probe", "plan", "--version"))
    assert CliRunner().invoke(app, ["trian"]).exit_code == 2


def test_types_and_licence_are_in_place():
    assert (SOURCES / "py.typed").is_file()
    assert "Apache License" in (ROOT / "LICENSE").read_text()


def test_what_the_readme_calls_by_its_module_is_there():
    assert callable(unwall.nn.linear_cross_entropy)
    assert callable(unwall.sparse.use)
