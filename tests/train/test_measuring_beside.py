"""The machine is measured while torch is imported: by a process of its own, and only where that changes nothing."""

import dataclasses
import sys

import pytest

from unwall.planner import remembered
from unwall.train import measuring
from unwall.train.options import Options


@pytest.fixture
def options(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(measuring, "CORES", 1)
    remembered.folder().mkdir(parents=True)
    file = remembered.folder() / remembered.NAMES.format("tested")
    monkeypatch.setattr(measuring, "_CODE", f"import pathlib; pathlib.Path({str(file)!r}).write_text('')")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    return Options(model=str(tmp_path / "model"), data=("data.txt",), out=str(tmp_path / "out"))


def test_it_is_measured_once(options):
    told = []
    assert measuring.measure_beside(options)
    measuring.outwait_measuring(lambda *said: told.append(said))
    assert told[-1] == ("done", 1, 1)
    assert remembered.any_machine()
    assert not measuring.measure_beside(options)
    measuring.outwait_measuring(None)  # nothing to wait for


def test_a_command_that_ends_before_ends_it(options, monkeypatch):
    monkeypatch.setattr(measuring, "_CODE", "input()")  # of nothing: only how it is ended counts
    assert measuring.measure_beside(options)
    process = measuring._started
    measuring.end_measuring()
    assert process.returncode is not None
    measuring.end_measuring()


def test_a_measurement_that_fails_is_left_to_this_process(options, monkeypatch):
    monkeypatch.setattr(measuring, "_CODE", "import sys; sys.exit(3)")
    assert measuring.measure_beside(options)
    measuring.outwait_measuring(None)
    assert not remembered.any_machine()


def test_not_where_it_would_be_disturbed_or_for_nothing(options, tmp_path, monkeypatch):
    assert not measuring.measure_beside(dataclasses.replace(options, disk=str(tmp_path)))
    (tmp_path / "plan.toml").write_text("")
    assert not measuring.measure_beside(dataclasses.replace(options, plan=str(tmp_path / "plan.toml")))
    with monkeypatch.context() as other:
        other.setenv("RANK", "1")
        assert not measuring.measure_beside(options)
    with monkeypatch.context() as other:
        other.setenv("LOCAL_WORLD_SIZE", "100000")  # all of them import meanwhile
        assert not measuring.measure_beside(options)
    monkeypatch.setattr(measuring, "CORES", sys.maxsize)
    assert not measuring.measure_beside(options)
