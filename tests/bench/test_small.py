"""The benchmark of small models: both rows train the same, and all that is promised is reported."""

import json

import pytest
from bench.small import GOAL, SMALL, main


def test_it_runs_and_reports(tmp_path, capsys):
    main(["--sizes", "0.5m", "--steps", "2", "--warm", "1", "--seq", "8", "--json", str(tmp_path / "small.json")])
    said = capsys.readouterr().out
    for part in ("504,672 parameters", "plain", "unwall", "ms per step", "Python calls", f"goal at most {GOAL:.2f}"):
        assert part in said
    (found,) = json.loads((tmp_path / "small.json").read_text())["sizes"]
    plain, unwall = (found["rows"][name] for name in ("plain", "unwall"))
    assert len(plain["times_s"]) == len(unwall["times_s"]) == 2
    assert found["ratio"] == pytest.approx(unwall["step_s"] / plain["step_s"])
    assert found["met"] == (found["ratio"] <= GOAL)
    assert found["losses_differ_at"] is None
    assert 0 < plain["python_calls"] < unwall["python_calls"]


def test_a_profile_names_where_the_time_goes(capsys):
    main(["--sizes", "0.5m", "--steps", "1", "--warm", "1", "--seq", "8", "--profile"])
    assert "call_edges.py" in capsys.readouterr().out


def test_the_sizes_are_those_of_their_names():
    assert 0.4e6 < SMALL["0.5m"].params < 0.6e6
    assert 1.8e6 < SMALL["2m"].params < 2.2e6
