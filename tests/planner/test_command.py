"""The commands ``unwall plan`` and ``unwall probe``: what they print, and what they say to bad input."""

import json
import os
import re
import resource
import subprocess
import sys

import pytest
import torch
from test_probe import counted as counted  # a fixture
from typer.testing import CliRunner

import unwall
from unwall import cli, terminal
from unwall.cli import app
from unwall.planner import measure

LLAMA_70B = {
    "model_type": "llama", "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64,
    "num_key_value_heads": 8, "vocab_size": 128256,
}  # fmt: skip


def run(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_a_shape_on_a_machine_one_does_not_have():
    found = run("plan", "24x2048", "--hardware", "8xh100", "--batch", 64)
    assert found.exit_code == 0, found.output
    first, paste, *rest = found.output.splitlines()
    assert first.startswith("1.21 B parameters on 8xH100, 8 ranks: fits; device ")
    assert " s per step (" in first
    assert ", limited by " in first
    assert paste.startswith("unwall.Plan(stage=")
    assert all(line.startswith("- ") for line in rest)
    long = run("plan", "24x2048", "--hardware", "8xh100", "--batch", 64, "--verbose").output
    for word in ("1.21 B parameters on 8xH100, 8 ranks: fits", "predicted step", "moments", "those that lost"):
        assert word in long


def test_the_line_to_paste_is_the_plan():
    found = run("plan", "32x4096", "--hardware", "rtx-4090")
    pasted = eval(found.output.splitlines()[1], {"unwall": unwall, "torch": torch})
    chosen = unwall.plan("32x4096", hardware="rtx-4090")
    assert pasted == chosen.to_plan()
    assert pasted.device_bytes < 24 << 30  # a plan carries what it was judged by
    assert "GiB'" in found.output.splitlines()[1]


@pytest.mark.parametrize("option", [["--disk-bytes", "1GB"], ["--device-bytes", "10M"]])
def test_the_users_own_budget_is_the_first_remedy(option):
    found = run("plan", "32x4096", "--hardware", "rtx-4090", "--host-bytes", "4G", *option)
    assert found.exit_code == 1, found.output
    told = re.search(rf"What would do: {option[0]} (\S+) ", found.output)
    assert told, found.output
    again = run("plan", "32x4096", "--hardware", "rtx-4090", "--host-bytes", "4G", *option, option[0], told[1])
    assert again.exit_code == 0, again.output


@pytest.mark.parametrize("kind", ["vit", "bert", "gemma2"])
def test_any_config_of_transformers(tmp_path, kind):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind, "num_hidden_layers": 2}))
    found = run("plan", tmp_path, "--hardware", "rtx-3090", "--dtype", "bf16", "--json")
    assert found.exit_code == 0, found.output
    assert json.loads(found.output)["model"] == kind


def test_a_disk_of_this_machine_must_exist(tmp_path):
    found = run("plan", "2x64", "--disk", tmp_path / "missing")
    assert found.exit_code == 2
    assert "is not a directory" in found.output


def test_a_reader_that_leaves_early_is_no_error(tmp_path):
    command = f"{sys.executable} -m unwall plan 24x2048 --hardware 8xh100 --verbose | head -c 10"
    found = subprocess.run(["bash", "-o", "pipefail", "-c", command], capture_output=True, text=True, check=False, timeout=280)
    assert (found.returncode, found.stderr) == (0, "")


def test_a_config_and_its_directory(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_70B | {"num_hidden_layers": 2}))
    for path in (tmp_path, tmp_path / "config.json"):
        found = run("plan", path, "--hardware", "pc-4090", "--json")
        assert found.exit_code == 0, found.output
        assert json.loads(found.output)["model"] == "llama"


def test_a_directory_whose_name_looks_like_a_shape(tmp_path, monkeypatch):
    """``unwall plan .`` inside the model's directory, too."""
    (tmp_path / "70").mkdir()
    (tmp_path / "70" / "config.json").write_text(json.dumps(LLAMA_70B | {"num_hidden_layers": 2}))
    monkeypatch.chdir(tmp_path)
    assert "llama" in run("plan", "70", "--hardware", "pc-4090", "--json").output
    assert "config.json" in run("plan", ".", "--hardware", "pc-4090").output  # there is none here
    monkeypatch.chdir(tmp_path / "70")
    assert "llama" in run("plan", ".", "--hardware", "pc-4090", "--json").output


def test_a_python_path(tmp_path, monkeypatch):
    (tmp_path / "a_model_of_mine.py").write_text("from torch import nn\ndef make():\n    return nn.Linear(4096, 4096)\n")
    monkeypatch.syspath_prepend(tmp_path)
    found = run("plan", "a_model_of_mine:make", "--hardware", "pc-4090", "--json")
    assert found.exit_code == 0, found.output
    assert json.loads(found.output)["model"] == "a_model_of_mine:make"


def test_fewer_devices_and_more_nodes():
    found = json.loads(run("plan", "24x2048", "--hardware", "8xh100", "--gpus", 4, "--nodes", 2, "--json").output)
    assert found["ranks"] == 8


def test_json_is_json_and_whole():
    found = json.loads(run("plan", "24x2048", "--hardware", "dgx-2", "--json", "--dry-run").output)
    assert found["plan"]["compute_dtype"] == "torch.float16"  # a V100 has no bfloat16
    assert found["prediction"]["bound_by"] in found["prediction"]["resource_s"]
    assert found["dry_run"]["ranks"] == 16


def test_a_picture(tmp_path):
    from xml.etree import ElementTree

    picture = tmp_path / "plan.svg"
    assert run("plan", "24x2048", "--hardware", "pc-4090", "--plot", picture).exit_code == 0
    text = " ".join(element.text or "" for element in ElementTree.parse(picture).iter())
    for word in ("moments", "step, simulated", "compute"):
        assert word in text


def test_a_dry_run_is_printed():
    found = run("plan", "24x2048", "--hardware", "8xh200", "--dry-run")
    assert found.exit_code == 0, found.output
    assert "by the formula, without padding" in found.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nothing"], "no model is called 'nothing'"),
        (["missing/config.json"], "no model is called"),
        (["80x"], "cannot read the shape '80x'"),
        (["0x128"], "layers must be at least 1"),
        (["json:loads"], "failed on the meta device: TypeError"),
        (["no_such_module_here:make"], "cannot be imported"),
        (["json:nothing"], "has no attribute 'nothing'"),
        (["json:__name__"], "expected a function that returns an nn.Module, got str"),
        (["24x2048", "--batch", "-3"], "batch must be a whole number above 0, got -3"),
        (["24x2048", "--batch", "12"], "12 samples cannot be dealt out evenly to 8 ranks"),
        (["24x2048", "--seq", "0"], "seq must be a whole number above 0"),
        (["24x2048", "--gpus", "0"], "devices_per_node must be a whole number greater than zero"),
        (["24x2048", "--gpus", "9"], "a node has 8 devices, asked for 9"),
        (["24x2048", "--nodes", "-1"], "nodes must be a whole number greater than zero"),
        (["24x2048", "--vocab", "-1"], "vocab must not be negative"),
        (["24x2048", "--tiles", "0"], "tiles must be at least 1"),
        (["24x2048", "--sequence-tiles", "-1"], "sequence_tiles must be at least 1"),
        (["24x2048", "--activations", "burn"], "activations is keep, auto, recompute or host, got 'burn'"),
        (["24x2048", "--activations", "keep", "--offload-activations"], "offload_activations is activations='host'"),
        (["24x2048", "--hardware", "abacus"], "no machine is called 'abacus'"),
        (["24x2048", "--hardware", "missing.json"], "missing.json: cannot be read"),
        (["24x2048", "--device-bytes", "-5GiB"], "device_bytes: cannot read '-5GiB'"),
        (["24x2048", "--device-bytes", "-5"], "device_bytes must not be negative"),
        (["24x2048", "--device-bytes", "1KiB"], "does not fit on 8xH100"),
        (["24x2048", "--host-bytes", "many"], "host_bytes: cannot read 'many'"),
        (["24x2048", "--dtype", "int4"], "dtype is one of bfloat16, float16, float32, got 'int4'"),
        (["24x2048", "--objective", "beauty"], "objective is speed or memory"),
        (["24x2048", "--plot", "picture.png"], "--plot writes an .svg file"),
        (["24x2048", "--plot", "missing/folder/picture.svg"], "missing/folder/picture.svg: no such directory"),
        (["300x65536"], "does not fit on 8xH100"),
        (["4x100000000", "--vocab", "1000000000000"], "2e+20 parameters, more than"),
        (["1000000x64"], "1e+06 layers, more than"),
        (["1000000x64", "--objective", "beauty"], "objective is speed or memory"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_input(arguments, message):
    given = arguments if "--hardware" in arguments else [*arguments, "--hardware", "8xh100"]
    found = run("plan", *given)
    assert found.exit_code == (1 if "does not fit" in message else 2)
    assert message in found.output
    assert found.output.startswith("unwall: ")
    assert "Traceback" not in found.output


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"model_type": "abacus"}, "transformers cannot build this config"),
        ({"model_type": "llama"}, "hidden_size is missing, so the model has no size"),
        ({"model_type": "llama", **LLAMA_70B, "vocab_size": -4}, "vocab_size must be a whole number above 0, got -4"),
        ([1, 2], "expected an object"),
        ("broken {", "expected an object"),
    ],
)
def test_bad_config(tmp_path, content, message):
    (tmp_path / "config.json").write_text(json.dumps(content))
    found = run("plan", tmp_path, "--hardware", "8xh100")
    assert found.exit_code == 2
    assert message in found.output
    assert "Traceback" not in found.output
    assert len(found.output) < 1000


def test_json_that_is_nested_too_deeply_is_named(tmp_path):
    (tmp_path / "config.json").write_text("[" * 100_000 + "]" * 100_000)
    (tmp_path / "machine.json").write_text('{"a":' * 100_000 + "1" + "}" * 100_000)
    for model, hardware in ((tmp_path, "8xh100"), ("4x64", tmp_path / "machine.json")):
        found = run("plan", model, "--hardware", hardware)
        assert found.exit_code == 2
        assert ".json: is nested too deeply to be read" in found.output


def test_probe_prints_a_table_and_json(counted, tmp_path):
    shown = run("probe", "--disk", tmp_path)
    assert shown.exit_code == 0, shown.output
    assert "host memory under AdamW" in shown.output
    assert "20.0 GB/s" in shown.output
    assert json.loads(run("probe", "--json").stdout)["host_memory_bytes_per_s"] == 20e9


def test_probe_without_permission(counted, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda *given: False)
    found = run("probe", "--disk", tmp_path)
    assert found.exit_code == 2
    assert "cannot be written" in found.output
    assert "Traceback" not in found.output


def test_probe_of_no_directory(counted, tmp_path):
    found = run("probe", "--disk", tmp_path / "missing")
    assert (found.exit_code, "is not a directory" in found.output) == (2, True)


def test_a_plan_for_this_machine_measures_it(counted):
    found = run("plan", "4x256", "--json")
    assert found.exit_code == 0, found.output
    assert json.loads(found.stdout)["machine"] == "this machine"
    assert "measuring this machine, once" in found.stderr
    assert counted


def test_a_probe_that_fails_is_said_plainly(counted, monkeypatch, tmp_path):
    monkeypatch.setattr(measure, "disk_rates", lambda directory: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    found = run("probe", "--disk", tmp_path)
    assert found.exit_code == 2
    assert "No space left on device" in found.output


@pytest.mark.clock
def test_70b_in_seconds(tmp_path):
    """The whole command, imports too, in seconds of a processor (others may be using the machine)."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_70B))
    command = [sys.executable, "-m", "unwall.cli", "plan", str(tmp_path), "--hardware", "8xh200", "--batch", "64"]
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    found = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert found.returncode == 0, found.stderr
    assert "70.6 B parameters on 8xH200" in found.stdout
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before < 8


def test_weights_are_cut_where_they_must_be_and_where_one_says_so():
    asked = ("plan", "1x4096", "--hardware", "pc-4090", "--device-bytes", "260MiB", "--seq", "128")
    found = run(*asked)
    assert found.exit_code == 0, found.output
    assert "; weights in up to 8 tiles" in found.output.splitlines()[0]
    assert "tiles=" not in found.output.splitlines()[1]  # shard cuts them by itself
    whole = run(*asked, "--tiles", "1")
    assert whole.exit_code == 1
    told = re.search(r"all weights in (\d+) tiles", whole.output)
    again = run(*asked, "--tiles", told[1])
    assert f", tiles={told[1]})" in again.output.splitlines()[1]


def test_activations_are_what_one_asks_for():
    asked = ("plan", "4x512", "--hardware", "pc-4090", "--batch", "2")
    for more, said in ((["--offload-activations"], "host"), (["--activations", "recompute"], "recompute"), ([], "keep")):
        found = run(*asked, *more)
        assert f"activations='{said}'" in found.output.splitlines()[1]
    assert "; activations recomputed (kept they take " in run(*asked, "--activations", "recompute").output.splitlines()[0]
    shown = run(*asked, "--verbose").output
    for word in ("activations, with this placement", "decided by block", "recomputed from the host"):
        assert word in shown
    assert "sequence_tiles=4" in run(*asked, "--sequence-tiles", "4").output.splitlines()[1]


def test_measuring_is_announced_where_it_happens(capfd):
    with terminal.progress():
        pass
    assert capfd.readouterr().err == ""
    with terminal.progress() as told:
        told("links", 0, 1)
        told("done", 1, 1)
    said = capfd.readouterr()
    assert said.out == ""
    assert said.err.count("measuring this machine, once") == 1


def test_a_run_directory_means_its_checkpoints(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    assert cli._of_run(tmp_path) == tmp_path  # not of a run
    (tmp_path / "run.json").write_text("{}")
    assert cli._of_run(tmp_path) == tmp_path / "checkpoints" == cli._of_run(tmp_path / "checkpoints")
    assert cli._of_run(tmp_path / "checkpoints" / "checkpoint-000001").name == "checkpoint-000001"
    (tmp_path / "checkpoints" / "adapters-000000002.pt").touch()
    with pytest.raises(ValueError, match="is what peft loads"):
        cli._of_run(tmp_path)
