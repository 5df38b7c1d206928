"""The suite's decisions: how processes ended, when losses agree, what a step can take at least."""

import math
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from bench.bound import SPLIT_UPDATE_BYTES, best_resident_flops, bound_seconds
from bench.launch import outcome, watch
from bench.losses import differs_at, disagreements
from bench.results import merge_rounds
from bench.shapes import SHAPES
from bench.spec import parse_spec
from bench.workload import build, fill

from unwall.planner.formulas import SPLIT_UPDATE_TRAFFIC_BYTES


def ended(tmp_path, *scripts, timeout=200):
    logs = [tmp_path / f"{index}.log" for index in range(len(scripts))]
    rows = [tmp_path / f"row{index}.json" for index in range(len(scripts))]
    commands = [["sh", "-c", script.replace("ROW", str(row))] for script, row in zip(scripts, rows, strict=True)]
    return outcome(watch(commands, [{}] * len(scripts), logs, timeout), rows, logs, timeout, tmp_path)


def is_running(number):
    """Nobody may be there to bury it."""
    try:
        return Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def test_a_killed_engine_says_so(tmp_path):
    row = ended(tmp_path, "echo half way; kill -9 $$")
    assert row["status"] == "killed"
    assert row["error"].endswith("last line: half way")


def test_a_crash_names_the_signal_and_the_last_line(tmp_path):
    row = ended(tmp_path, "echo bad assertion >&2; kill -ABRT $$")
    assert row["status"] == "crashed"
    assert "SIGABRT" in row["error"]
    assert "bad assertion" in row["error"]


def test_one_failed_rank_ends_the_others(tmp_path):
    row = ended(tmp_path, "sleep 100", "echo alone; exit 3")
    assert row["status"] == "crashed"
    assert "exit code 3; last line: alone" in row["error"]


def test_what_a_rank_wrote_beats_the_time_out_of_the_one_that_waits(tmp_path):
    row = ended(tmp_path, "sleep 100", """echo '{"status": "out of memory", "error": "full"}' > ROW""", timeout=5)
    assert (row["status"], row["error"]) == ("out of memory", "full")


def test_children_end_with_their_rank_and_count_as_memory(tmp_path):
    number = tmp_path / "number"
    child = f"import os, time; open({str(number)!r}, 'w').write(str(os.getpid())); x = b'1' * (200 << 20); time.sleep(1000)"
    for limit_s in (1, 4, 16, 64):  # until it is looked at when it has its memory
        number.unlink(missing_ok=True)
        row = ended(tmp_path, f'{sys.executable} -S -c "{child}"; true', timeout=limit_s)
        assert row["status"] == "timed out"
        if row["host_peak_bytes"] > 200 << 20:
            break
    assert row["host_peak_bytes"] > 200 << 20
    until = time.monotonic() + 60  # it was killed, and ends as soon as it can
    while (runs := is_running(number.read_text())) and time.monotonic() < until:
        time.sleep(0.01)
    assert not runs


def test_an_engine_that_ends_without_a_row_crashed(tmp_path):
    assert ended(tmp_path, "true")["error"] == "ended without a row; it printed nothing"


LOSSES = [6.25, 6.23, 6.20, 6.19, 6.16]


def test_rounding_agrees_and_a_skipped_update_does_not():
    assert differs_at([loss * 1.0005 for loss in LOSSES], LOSSES) is None
    assert differs_at([LOSSES[0], *LOSSES[:-1]], LOSSES) == 1
    assert differs_at([6.25, 6.23, math.nan, 6.19, 6.16], LOSSES) == 2
    assert differs_at(LOSSES[:-1], LOSSES) == 4


def row(engine="plain", tier="device", **changes):
    base = {"engine": engine, "tier": tier, "status": "ok", "shape": "3b", "batch": 8, "seq": 2048, "world": 1, "clip": 1.0}
    return (
        base
        | {
            "losses": LOSSES,
            "times_s": [1.0, 1.2],
            "processor_s": 2.0,
            "host_peak_bytes": 10 << 30,
            "device_peak_bytes": 9 << 30,
        }
        | changes
    )


def test_only_engines_of_one_case_are_compared():
    other = [loss + 1 for loss in LOSSES]
    assert disagreements([row(), row("b", losses=other, clip=None), row("c", losses=other, shape="7b")]) == []
    assert disagreements([row("b", status="crashed", losses=other), row()]) == []
    (said,) = disagreements([row(), row("b", losses=other)])
    assert "b has 7.25000 at step 0, plain has 6.25000" in said


def test_a_first_loss_that_is_not_a_number_disagrees():
    assert disagreements([row(losses=[math.nan] * 3)])


SPEEDS = {"host_bytes_per_s": 100e9, "host_to_device_bytes_per_s": 50e9, "device_to_host_bytes_per_s": 50e9}
DISK = {"disk_read_bytes_per_s": 3e9, "disk_write_bytes_per_s": 3e9, "disk_both_bytes_per_s": 4e9}


def test_the_bound_of_each_tier():
    params = SHAPES["3b"].params
    rows = [row(), row("slow", times_s=[2.0])]
    assert best_resident_flops(rows) == pytest.approx(SHAPES["3b"].flops(8, 2048))
    assert bound_seconds(rows[0], rows, SPEEDS) == {"compute": pytest.approx(1.0)}
    host = bound_seconds(row("h", "host"), rows, SPEEDS)
    assert host == pytest.approx({"compute": 1.0, "host update": params * 26 / 100e9, "link": params * 4 / 50e9})
    disk = bound_seconds(row("d", "disk"), rows, SPEEDS | DISK)
    assert disk["disk"] == pytest.approx((14 * params - (19 << 30)) / 2e9)
    lean = bound_seconds(row("d:states=lean", "disk"), rows, SPEEDS | DISK)
    assert lean["disk"] == pytest.approx((7 * params - (19 << 30)) / 2e9)
    assert lean["host update"] == pytest.approx(params * 12 / 100e9)
    transient = bound_seconds(row("d:host_bytes=9GiB,grads=transient", "disk"), rows, SPEEDS | DISK)
    assert transient["disk"] == pytest.approx((12 * params - (19 << 30)) / 2e9)
    assert bound_seconds(row("d", "disk"), rows, SPEEDS) == {}
    alone = bound_seconds(row("h", "host"), [row("h", "host")], SPEEDS)
    assert alone.keys() == {"host update", "link"}
    assert bound_seconds(row("a", "auto"), [row("a", "auto")], SPEEDS) == {}


def test_rounds_are_pooled_and_a_failed_one_shows():
    first = row(first_step_s=9.0)
    second = row(first_step_s=3.0, times_s=[0.8, 0.9], host_peak_bytes=11 << 30)
    merged = merge_rounds([first, second])
    assert merged["times_s"] == [1.0, 1.2, 0.8, 0.9]
    assert merged["first_step_s"] == 9.0
    assert merged["host_peak_bytes"] == 11 << 30
    assert merged["round_medians_s"] == pytest.approx([1.1, 0.85])
    assert merge_rounds([first, {"status": "killed", "error": "x"}]) == {"status": "killed", "error": "x"}


def test_options_behind_a_name():
    spec = parse_spec("unwall-host:device_bytes=9GiB,clip=none,update_in_backward=1")
    assert (spec.name, spec.clip) == ("unwall-host", None)
    assert spec.options == {"params": "host", "optimizer": "host", "device_bytes": "9GiB", "update_in_backward": "1"}
    assert parse_spec("plain").clip == 1.0


def test_shapes_have_the_parameters_they_count():
    model = build(SHAPES["tiny"], "meta")
    assert sum(param.numel() for param in model.parameters()) == SHAPES["tiny"].params
    assert 1.9e10 < SHAPES["20b"].params < 2.1e10


def test_a_model_filled_later_equals_one_built_at_once():
    built, later = build(SHAPES["tiny"], "cpu"), build(SHAPES["tiny"], "meta")
    later.to_empty(device="cpu")
    fill(later, torch.device("cpu"))
    for (name, expected), value in zip(built.named_parameters(), later.parameters(), strict=True):
        assert torch.equal(expected, value), name
        assert expected.dim() == 1 or 0.01 < expected.std() < 0.03


def test_the_suite_itself_starts_without_torch():
    code = "import sys, bench.cli; print('torch' in sys.modules, 'unwall' in sys.modules)"
    root = Path(__file__).parent.parent.parent
    assert subprocess.check_output([sys.executable, "-c", code], cwd=root, text=True).split() == ["False", "False"]


def test_the_bound_counts_the_update_as_the_planner_does():
    assert SPLIT_UPDATE_BYTES == SPLIT_UPDATE_TRAFFIC_BYTES
