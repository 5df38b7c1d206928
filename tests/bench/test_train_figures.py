"""The rows that ``tools/gpu_check train`` leaves for docs/train.md."""

import json
import subprocess

from bench.train_figures import first_step, row

from unwall.report.run import read_run


def test_a_run_becomes_a_row(tmp_path):
    folder = tmp_path / "train-8b"
    folder.mkdir()
    said = {"version": 1, "model": {"params": 8_030_000_000}, "prediction": {"step_s": 2.5}}
    (folder / "run.json").write_text(json.dumps(said))
    held = {"device": 20 << 30, "host": 96 << 30}
    lines = [{"kind": "start", "step": 0, "seconds": 26.8, "parts": {"imports": 5.3, "counting": 0.01}}]
    for step, seconds in enumerate((9.0, 2.5, 7.0, 3.0, 2.6), 1):
        line = {"kind": "step", "step": step, "seconds": seconds, "tokens": 16384, "tokens_per_second": 16384 / seconds}
        line |= {"loss": 1.0, "peak_bytes": held, "live_bytes": held, "allocated_bytes": 24 << 30}
        lines.append(line | ({"profiled": True} if step == 3 else {}))
    (folder / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    expected = "| train-8b | 8.03 B | 16,384 | 2.6 (2.5 to 3) | 2.5 | 6,302 | 20.0 GiB | 24.0 GiB | 96.0 GiB |"
    assert row(read_run(folder)) == expected
    assert first_step(read_run(folder)) == "train-8b: first step after 26.8 s: imports 5.3"


def test_the_script_can_be_read_by_its_shell():
    subprocess.run(["bash", "-n", "tools/gpu_check"], check=True)
