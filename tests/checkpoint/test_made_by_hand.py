"""Manifests that somebody has changed by hand, and buffers that do not take every value: found before anything changes."""

import json
import zlib

import pytest
import torch
from checkpoint_tools import differing, everything
from torch import nn

import unwall
from unwall.checkpoint.manifest import MANIFEST

HOST = unwall.Plan(params="host", optimizer="host")


class Expanded(nn.Module):
    """Four elements of a buffer are one place in memory, where it is expanded."""

    def __init__(self, expanded):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("scale", torch.ones(2, 1).expand(2, 4) if expanded else torch.ones(2, 4))
        self.register_buffer("empty", torch.ones(0, 1).expand(0, 4))


def test_buffers_that_are_expanded(tmp_path):
    torch.manual_seed(0)
    model, other = unwall.shard(Expanded(False)), unwall.shard(Expanded(True))
    model.scale[1] = 3.0
    path = unwall.save(tmp_path / "c", model)
    unwall.export_weights(model, tmp_path / "out")
    unwall.load(path, other)
    assert torch.equal(other.scale, model.scale)
    unwall.load_weights(other, tmp_path / "out")
    assert torch.equal(other.scale, model.scale)
    model.scale[1, 2] = 4.0
    before = dict(other.state_dict())
    with unwall.full_params(model, write=True), torch.no_grad():
        model.linear.weight.zero_()
    with pytest.raises(unwall.CheckpointError, match="scale is an expanded tensor here"):
        unwall.load(unwall.save(tmp_path / "c", model), other)
    assert differing(before, dict(other.state_dict())) == []


def training():
    torch.manual_seed(0)
    model = unwall.shard(nn.Linear(8, 4), HOST)
    return model, unwall.AdamW(model.parameters(), lr=0.1)


def step(model, optimizer):
    model(torch.ones(2, 8)).float().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A checkpoint, what its manifest says, and a training with other values."""
    model, optimizer = training()
    step(model, optimizer)
    path = unwall.save(tmp_path_factory.mktemp("by_hand"), model, optimizer, extra={"a": 1})
    step(model, optimizer)
    return path, (path / MANIFEST).read_text(), model, optimizer, everything(model, optimizer)


WRONG = [
    (("optimizer", "params", "weight", "step"), {}),
    (("optimizer", "params", "weight"), 1.5),
    (("optimizer", "groups", 0, "options"), 7),
    (("optimizer", "groups", 0, "options", "lr"), "x"),
    (("optimizer", "groups", 0, "params", 1), -1),
    (("optimizer", "scaler"), {"a": 1}),
    (("ranks", 0, "rng"), {}),
    (("ranks", 0, "rng", "python", "$tuple", 1), ""),
    (("ranks", 0, "extra"), {"$what": 1}),
    (("tensors", 0, "kind"), {"a": 1}),
]


@pytest.mark.parametrize(("where", "value"), WRONG, ids=[".".join(map(str, where)) for where, _ in WRONG])
def test_a_manifest_that_was_made_by_hand(saved, where, value):
    """Its checksum is right: what is in it is looked at before anything changes all the same."""
    path, text, model, optimizer, before = saved
    content = json.loads(text)["manifest"]
    found = content
    for key in where[:-1]:
        found = found[key]
    found[where[-1]] = value
    body = json.dumps(content, separators=(",", ":"))
    (path / MANIFEST).write_text(f'{{"crc32":"{zlib.crc32(body.encode()):08x}","manifest":{body}}}\n')
    with pytest.raises(unwall.CheckpointError):
        unwall.load(path, model, optimizer)
    assert differing(before, everything(model, optimizer)) == []


def test_weights_are_not_written_into_a_checkpoint(tmp_path):
    model, _ = training()
    path = unwall.save(tmp_path, model)
    with pytest.raises(ValueError, match="is a checkpoint of unwall"):
        unwall.export_weights(model, path)
    unwall.load(path, model)
    assert sorted(file.name for file in path.iterdir()) == [MANIFEST, "rank-00000.safetensors"]
    (tmp_path / MANIFEST).write_text("of another program")
    unwall.export_weights(model, tmp_path)
