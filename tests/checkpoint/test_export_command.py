"""``unwall export`` and ``unwall inspect``: what is in a checkpoint, without the model that wrote it."""

import json
import os
import shutil

import pytest
import torch
from hub_models import loss_of, tiny
from ranks import rank_and_world
from safetensors.torch import load_file
from typer.testing import CliRunner

import unwall
from unwall.checkpoint.checksums import crc
from unwall.checkpoint.manifest import MANIFEST
from unwall.cli import app


def run(*args):
    return CliRunner().invoke(app, [str(arg) for arg in args])


def trained(kind, folder, options):
    """Saves a checkpoint, and what export_weights writes at the same time."""
    model = unwall.shard(tiny(kind), unwall.Plan(**options))
    optimizer = unwall.AdamW(model.parameters(), lr=1e-2)
    loss_of(model.train(), kind).backward()
    optimizer.step()
    unwall.save(folder / "saved", model, optimizer, extra={"epoch": 2})
    unwall.export_weights(model, folder / "live")
    return rank_and_world()


@pytest.mark.parametrize(("kind", "world", "options"), [("mixtral", 2, {"params": "host", "optimizer": "host"}), ("t5", 1, {})])
def test_an_offline_export_is_what_the_model_itself_would_write(ranks, tmp_path, kind, world, options):
    ranks(world).run(trained, kind, tmp_path, options)
    found = run("export", tmp_path / "saved", tmp_path / "offline")
    assert found.exit_code == 0, found.output
    live, offline = (load_file(tmp_path / name / "model.safetensors") for name in ("live", "offline"))
    assert live.keys() == offline.keys()
    assert all(torch.equal(live[name], offline[name]) for name in live)
    for name in ("config.json", "generation_config.json"):
        assert (tmp_path / "live" / name).read_text() == (tmp_path / "offline" / name).read_text()

    found = run("export", tmp_path / "saved", tmp_path / "small", "--dtype", "bfloat16", "--max-shard-size", "20KB")
    assert found.exit_code == 0, found.output
    back = type(tiny(kind)).from_pretrained(tmp_path / "small", dtype="auto").state_dict()
    full = type(tiny(kind)).from_pretrained(tmp_path / "live").state_dict()
    assert all(torch.equal(back[name], full[name].to(torch.bfloat16)) for name in full)


def test_a_plain_model_keeps_its_names(tmp_path):
    torch.manual_seed(0)
    model = unwall.shard(torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.BatchNorm1d(6)))
    unwall.save(tmp_path / "saved", model)
    assert run("export", tmp_path / "saved", tmp_path / "out").exit_code == 0
    found, wanted = load_file(tmp_path / "out" / "model.safetensors"), model.state_dict()
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["model.safetensors"]


def test_inspect_says_what_is_there_and_verifies_it(ranks, tmp_path):
    ranks(2).run(trained, "llama", tmp_path, {"stage": 2})
    shown = run("inspect", tmp_path / "saved")
    assert shown.exit_code == 0, shown.output
    for text in ("checkpoint-000001", "LlamaForCausalLM", "AdamW", "2 ranks", "Plan(stage=2", "rank-00001.safetensors"):
        assert text in shown.output
    about = json.loads(run("inspect", tmp_path / "saved", "--verify", "--json").output)
    assert about["step"] == 1
    assert about["verified"]
    assert about["tensors"]["optimizer states"]["count"] == 2 * about["tensors"]["parameters"]["count"]

    file = tmp_path / "saved" / "checkpoint-000001" / "rank-00001.safetensors"
    data = bytearray(file.read_bytes())
    data[-7] ^= 1
    file.write_bytes(data)
    assert run("inspect", tmp_path / "saved").exit_code == 0
    damaged = run("inspect", tmp_path / "saved", "--verify")
    assert damaged.exit_code == 2
    assert "rank-00001.safetensors is damaged" in damaged.output
    assert "Traceback" not in damaged.output
    file.unlink()
    assert run("inspect", tmp_path / "saved").exit_code == 2


def test_bad_arguments_are_one_line(tmp_path):
    for args in (("export", tmp_path, tmp_path / "out"), ("inspect", tmp_path / "nothing")):
        found = run(*args)
        assert found.exit_code == 2
        assert "no complete checkpoint" in found.output
        assert len(found.output.strip().splitlines()) == 1
    assert not (tmp_path / "out").exists()


def manifest_with(**changes):
    """Of a checkpoint in ``folder``, with a checksum that fits."""

    def damage(folder):
        path = folder / MANIFEST
        content = json.loads(path.read_bytes())["manifest"] | changes
        body = json.dumps(content, separators=(",", ":"))
        path.write_text(f'{{"crc32":"{crc(body.encode()):08x}","manifest":{body}}}\n')

    return damage


def one_flipped(folder):
    (file,) = folder.glob("*.safetensors")
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


def of_another_program(folder):
    (folder / MANIFEST).write_text('{"name": "a web application"}')


def cut_off(folder):
    path = folder / MANIFEST
    path.write_bytes(path.read_bytes()[:100])


def without_a_file(folder):
    next(folder.glob("*.safetensors")).unlink()


def too_short(folder):
    os.truncate(next(folder.glob("*.safetensors")), 5000)


DAMAGES = {
    "flipped bit": one_flipped,
    "other program": of_another_program,
    "cut manifest": cut_off,
    "missing file": without_a_file,
    "short file": too_short,
    "no ranks": manifest_with(world_size=0, ranks=[]),
    "step": manifest_with(step="many"),
    "model": manifest_with(model=[1]),
    "versions": manifest_with(versions="1.0"),
    "files": manifest_with(files=[{"name": "../x", "nbytes": 1, "header_bytes": 1, "header_crc": 1}]),
    "config": manifest_with(model={"class": "LlamaForCausalLM", "config": {"hidden_size": "wide\nor not"}}),
    "tensors": manifest_with(tensors=None),
    "version": manifest_with(version=99),
}


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plain")
    return unwall.save(folder, unwall.shard(torch.nn.Linear(64, 64)))


@pytest.mark.parametrize("damage", DAMAGES)
def test_what_is_damaged_is_one_line(plain, tmp_path, damage):
    folder = tmp_path / "checkpoint-000001"
    shutil.copytree(plain, folder)
    DAMAGES[damage](folder)
    inspected = run("inspect", folder, "--verify")
    exported = run("export", folder, tmp_path / "out")
    for found in (inspected, exported) if damage != "config" else (exported,):
        assert found.exit_code == 2, found.output
        assert found.stderr.startswith("unwall: ")
        assert len(found.output.strip().splitlines()) == 1
    assert not list((tmp_path / "out").glob("*.safetensors"))


@pytest.mark.parametrize("kind", ["weights", "dcp", "deepspeed", "file", "nothing", "manifest folder"])
def test_what_others_wrote_is_one_line(tmp_path, kind):
    folder = tmp_path / "there"
    folder.mkdir()
    if kind == "weights":
        (folder / "config.json").write_text("{}")
        (folder / "model.safetensors").write_bytes(b"")
    elif kind == "dcp":
        (folder / ".metadata").write_bytes(b"")
    elif kind == "deepspeed":
        (folder / "mp_rank_00_model_states.pt").write_bytes(b"")
    elif kind == "file":
        folder = folder / "model.safetensors"
        folder.write_bytes(b"")
    elif kind == "nothing":
        folder = folder / "no such directory"
    else:
        (folder / MANIFEST).mkdir()
    for found in (run("inspect", folder), run("export", folder, tmp_path / "out")):
        assert found.exit_code == 2, found.output
        assert found.stderr.startswith("unwall: ")
        assert str(folder) in found.stderr
        assert len(found.output.strip().splitlines()) == 1
    assert not (tmp_path / "out").exists()
