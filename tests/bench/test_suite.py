"""The suite as a user runs it: real engines, tiny shapes, in processes of their own."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).parents[2]


def run_suite(*arguments, out, expect=0):
    # DeepSpeed may have been sourced into the shell that runs the tests; here it must not be found.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, "-m", "bench", *map(str, arguments), "--out", str(out), "--scratch", str(out.parent)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == expect, done.stdout + done.stderr
    return done


def saved(out):
    (path,) = out.glob("*.json")
    return json.loads(path.read_text())


TINY = ("--shapes", "tiny", "--batch", 2, "--seq", 32, "--steps", 2, "--warm", 1)


@pytest.fixture(scope="module")
def four_engines(tmp_path_factory):
    out = tmp_path_factory.mktemp("suite") / "out"
    engines = ("plain", "fsdp2", "unwall", "unwall-host:device_bytes=64MiB")
    done = run_suite("--engines", *engines, *TINY, "--profile", out.parent / "lanes", out=out)
    return out, done


def test_engines_that_can_give_a_time_line_do(four_engines):
    lanes = four_engines[0].parent / "lanes"
    assert {path.name for path in lanes.iterdir()} == {
        f"{engine}.tiny.{suffix}" for engine in ("unwall", "unwall-host_device_bytes_64MiB") for suffix in ("svg", "json")
    }
    spans = json.loads((lanes / "unwall-host_device_bytes_64MiB.tiny.json").read_text())["traceEvents"]
    assert {"compute", "host>device", "device>host", "update"} <= {span.get("cat") for span in spans}


def test_engines_train_the_same_model(four_engines):
    rows = saved(four_engines[0])["rows"]
    assert [row["status"] for row in rows] == ["ok"] * 4
    first = rows[0]["losses"]
    assert len(first) == 3
    assert first[2] < first[0]
    for row in rows[1:]:
        assert row["losses"] == pytest.approx(first, abs=0.002)


def test_a_row_says_what_a_reader_needs(four_engines):
    for row in saved(four_engines[0])["rows"]:
        assert row["step_min_s"] <= row["step_s"] <= row["step_max_s"]
        assert row["tokens_per_s"] == pytest.approx(64 / row["step_s"])
        assert row["model_tflops"] > 0
        assert 100 << 20 < row["host_peak_bytes"] < 4 << 30
        assert row["first_step_s"] > 0
        assert row["warm_times_s"][0] > 0
        assert row["disk_written_bytes"] is not None
        assert 0 < row["bound_percent"] <= 100.01 or row["tier"] == "host"
        assert set(row["versions"]) == {"engine", "torch", "python"}


def test_the_run_is_printed_saved_and_drawn(four_engines):
    out, done = four_engines
    (page,), (picture,) = out.glob("*.md"), out.glob("*.svg")
    assert "unwall-host:device_bytes=64MiB" in page.read_text()
    assert "Losses agree." in page.read_text()
    assert saved(out)["command"].startswith("python -m bench --engines plain fsdp2")
    assert str(ROOT) not in page.read_text()
    assert sum(part.tag.endswith("rect") for part in ElementTree.parse(picture).iter()) == 1 + 4
    assert "the speed of unwall is" in page.read_text()
    assert "tokens/s" in done.stdout
    assert not list(out.parent.glob("bench-scratch-*"))


def test_two_ranks_agree(tmp_path):
    run_suite("--engines", "fsdp2-offload", "unwall-host", "--world", 2, *TINY, out=tmp_path / "out")
    assert [row["status"] for row in saved(tmp_path / "out")["rows"]] == ["ok", "ok"]


def test_failures_are_rows_and_the_suite_goes_on(tmp_path):
    engines = (
        "deepspeed-host",
        "torchao:clip=none",
        "unwall-host:device_bytes=1KiB",
        "unwall:no_such_field=1",
        "plain:clip=none",
    )
    run_suite("--engines", *engines, *TINY, out=tmp_path / "out")
    rows = saved(tmp_path / "out")["rows"]
    assert [row["status"] for row in rows] == ["not installed", "not installed", "crashed", "crashed", "ok"]
    assert "No module named 'deepspeed'" in rows[0]["error"]
    assert "device_bytes" in rows[2]["error"]
    assert "no_such_field" in rows[3]["error"]
    assert rows[4]["clip"] is None
    (page,) = (tmp_path / "out").glob("*.md")
    assert "not installed" in page.read_text()


def test_an_engine_that_takes_too_long_is_a_row(tmp_path):
    run_suite("--engines", "plain", *TINY, "--timeout", 0.3, out=tmp_path / "out", expect=3)
    (row,) = saved(tmp_path / "out")["rows"]
    assert row["status"] == "timed out"
    assert "0.3 s" in row["error"]


def test_a_stopped_run_keeps_what_it_measured_and_leaves_nothing_running(tmp_path):
    command = [sys.executable, "-m", "bench", "--engines", "plain", "--repeats", "1000", *map(str, TINY)]
    command += ["--out", str(tmp_path / "out"), "--scratch", str(tmp_path)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as suite:
        assert "s/step" in suite.stderr.readline()
        suite.terminate()
        assert suite.wait(250) == 130
    assert [row["status"] for row in saved(tmp_path / "out")["rows"]] == ["ok"]
    assert not list(tmp_path.glob("bench-scratch-*"))


def test_reports_merge_into_one_page(four_engines, tmp_path):
    (path,) = four_engines[0].glob("*.json")
    other = json.loads(path.read_text()) | {"title": "another machine"}
    (tmp_path / "other.json").write_text(json.dumps(other))
    page = tmp_path / "docs" / "page.md"
    run_suite("--report", path, tmp_path / "other.json", "--docs", page, out=tmp_path / "out")
    text = page.read_text()
    assert text.count("\n## ") == 3
    assert "## another machine" in text
    overview = text[text.index("## Overview") : text.index("Machine:")]
    assert re.search(r"\| another machine \| unwall \|.* times plain.*\|  \|\n", overview)
    assert re.search(r"\| another machine \| unwall-host.*\| \d+\.\d \|\n", overview)
    assert "](page.svg)" in text
    assert "another machine" in page.with_suffix(".svg").read_text()


def test_losses_that_disagree_fail_the_run(four_engines, tmp_path):
    (path,) = four_engines[0].glob("*.json")
    result = json.loads(path.read_text())
    result["rows"][2]["losses"][2] += 0.1
    (tmp_path / "wrong.json").write_text(json.dumps(result))
    done = run_suite("--report", tmp_path / "wrong.json", out=tmp_path / "out", expect=1)
    assert "losses disagree: tiny: unwall has" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--engines", "megatron"], "no engine is named 'megatron'"),
        (["--engines", "plain:device_bytes=1GiB"], "plain has no option device_bytes"),
        (["--engines", "plain:clip=-1"], "clip is a positive number or none"),
        (["--engines", "unwall:device_bytes"], "no OPTION=VALUE"),
        (["--report", "pyproject.toml"], "pyproject.toml"),
        (["--report", "no-such-file.json"], "no-such-file.json"),
        (["--shapes", "huge"], "invalid choice"),
        (["--steps", "0"], "expected 1 or more"),
    ],
)
def test_a_wrong_command_says_what_is_wrong(arguments, said, capsys, monkeypatch):
    from bench.cli import main

    monkeypatch.chdir(ROOT)
    try:
        code = main(arguments)
    except SystemExit as ended:  # argparse ends the program itself
        code = ended.code
    assert code == 2
    assert said in capsys.readouterr().err
