"""The README is short-lined and true: its first example runs, and what it names is there."""

import re
from pathlib import Path

import pytest
import torch

import unwall

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "README.md").read_text()
PROSE = sorted(path.name for path in ROOT.glob("*.md"))


@pytest.mark.parametrize("name", PROSE)
def test_no_line_is_longer_than_120_characters(name):
    long = [f"{name}:{number}" for number, line in enumerate((ROOT / name).read_text().splitlines(), 1) if len(line) > 120]
    assert long == []


def test_the_first_example_runs_and_trains():
    torch.manual_seed(0)
    names = {}
    exec(re.search(r"```python\n(.*?)```", TEXT, re.DOTALL)[1], names)
    assert unwall.stats(names["model"]).steps == 10
    assert names["loss"].item() > 0


def test_every_example_in_the_readme_is_python():
    for block in re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL):
        compile(block, "README.md", "exec")


def test_the_table_of_the_api_is_the_api():
    """Every public name is in the README, and every function it lists exists."""
    listed = TEXT.split("## API")[1].split("## ")[0]
    for name in unwall.__all__:
        assert f"`{name}" in listed or name == "__version__", name
    for name in re.findall(r"^\| `(\w+)[(`]", listed, re.MULTILINE):
        assert hasattr(unwall, name), name


def test_the_files_and_make_targets_it_names_are_there():
    for path in re.findall(r"(?<![\w/])((?:src|docs|tools|examples|tests|bench)/[\w./-]*\w)", TEXT):
        assert (ROOT / path).exists(), path
    targets = re.search(r"^\.PHONY:(.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)[1].split()
    assert set(re.findall(r"`make ([\w-]+)`", TEXT)) <= set(targets)


def test_every_example_is_in_the_readme():
    for path in (ROOT / "examples").glob("*.py"):
        assert f"examples/{path.name}" in TEXT
