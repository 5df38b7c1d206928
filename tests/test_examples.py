"""Every example runs as its docstring says, on a CPU, and learns. Those for one process share this one: torch is imported once."""

import contextlib
import io
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

import unwall

EXAMPLES = Path(__file__).parent.parent / "examples"
NAMES = sorted(path.stem for path in EXAMPLES.glob("*.py"))
LAUNCHER = {
    "several_ranks": [
        "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1", "--nproc-per-node", "2"
    ]
}  # fmt: skip
POOLED = {"tensor_parallel": 4, "three_dimensions": 4}
"""Examples whose ``main`` runs in rank processes that are there already: how many."""


def run(name):
    """The example in a process of its own: what it printed."""
    command = [sys.executable, *LAUNCHER.get(name, []), str(EXAMPLES / f"{name}.py")]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(Path(unwall.__file__).parent.parent), os.environ.get("PYTHONPATH", "")]),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    found = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=280)
    assert found.returncode == 0, found.stderr
    return found.stdout


def in_a_rank(name):
    """The example's ``main`` as one of several ranks: what it printed."""
    with contextlib.redirect_stdout(io.StringIO()) as shown:
        runpy.run_path(str(EXAMPLES / f"{name}.py"))["main"]()
    return shown.getvalue()


def losses(shown):
    return [float(value) for value in re.findall(r"loss(?: of \d+ ranks)? (\d+\.\d+)", shown)]


@pytest.fixture
def here(monkeypatch, capsys):
    """Runs an example with arguments in this process: what it printed."""

    def run_here(name, *arguments):
        path = str(EXAMPLES / f"{name}.py")
        monkeypatch.setattr(sys, "argv", [path, *map(str, arguments)])
        runpy.run_path(path, run_name="__main__")
        return capsys.readouterr().out

    return run_here


@pytest.mark.parametrize("name", NAMES)
def test_an_example_runs_and_learns(name, here, ranks):
    if name in POOLED:
        found = losses("".join(ranks(POOLED[name]).run(in_a_rank, name)))
    else:
        found = losses(run(name) if name in LAUNCHER else here(name))
    assert len(found) > 3
    assert found[-1] < 0.8 * found[0]


@pytest.mark.parametrize("name", NAMES)
def test_an_example_says_what_it_shows_and_how_to_run_it(name):
    text = (EXAMPLES / f"{name}.py").read_text()
    assert f"examples/{name}.py" in text.split('"""')[1]


def test_budgets_and_disk_of_the_command_line_are_kept(here, tmp_path):
    shown = here("larger_than_memory", "--device-bytes", "2MiB", "--host-bytes", "10MiB", "--disk", tmp_path, "--steps", 2)
    budgets = dict(re.findall(r"^(device|host) .*  (\S+ MiB)$", shown, re.MULTILINE))
    assert budgets == {"device": "2.0 MiB", "host": "10.0 MiB"}
    assert "written to disk per step" in shown


def test_a_config_file_is_shown_key_by_key(here, tmp_path):
    config = tmp_path / "ds_config.json"
    config.write_text('{"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}')
    shown = here("from_deepspeed", config)
    assert "Plan.optimizer='host'" in shown
    assert losses(shown) == []
