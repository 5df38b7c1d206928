"""Checkpoints that are damaged or of another model: found, and named, before anything of the model changes."""

import dataclasses
import os
import pickle

import pytest
import torch
from checkpoint_tools import TIERS, Setup, begin, differing, everything, step
from ranks import rank_and_world
from torch import nn

import unwall
from unwall.checkpoint.manifest import MANIFEST, dumps, loads
from unwall.checkpoint.validation import read_manifest
from unwall.checkpoint.waiting import Waiting
from unwall.plans import Plan

SETUP = Setup(blocks=2)
FILE = "rank-00000.safetensors"


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A checkpoint, and a model with other values that must keep them."""
    folder = tmp_path_factory.mktemp("damage")
    model, optimizer = begin(SETUP, TIERS["host"], folder)
    step(model, optimizer, SETUP, 0)
    path = unwall.save(folder, model, optimizer)
    step(model, optimizer, SETUP, 1)
    return path, model, optimizer, everything(model, optimizer)


@pytest.fixture
def refused(saved):
    """``refused(match)``: loading raises that, and changes nothing. Whatever the test damages is made good again."""
    path, model, optimizer, before = saved
    kept = {file.name: file.read_bytes() for file in path.iterdir()}

    def check(match):
        with pytest.raises(unwall.CheckpointError, match=match):
            unwall.load(path, model, optimizer)
        assert differing(before, everything(model, optimizer)) == []

    yield check
    for name, data in kept.items():
        (path / name).unlink(missing_ok=True)
        (path / name).write_bytes(data)


def place_of(path, kind, name, state=None):
    manifest = read_manifest(path)
    found = next(t for t in manifest.tensors if (t.kind, t.name, t.state) == (kind, name, state))
    return found.pieces[0].offset, found.nbytes(found.pieces[0])


def rewrite(path, change):
    """The manifest after ``change``, with a checksum that fits."""
    manifest = loads((path / MANIFEST).read_bytes(), "")
    (path / MANIFEST).write_bytes(dumps(change(manifest)))


@pytest.mark.parametrize(
    ("kind", "name", "state", "label"),
    [
        ("param", "1.linear.weight", None, "param 1.linear.weight"),
        ("state", "0.norm.bias", "exp_avg_sq", "exp_avg_sq of 0.norm.bias"),
        ("value", "rng.torch", None, "value rng.torch of rank 0"),
    ],
)
def test_a_flipped_bit(saved, refused, kind, name, state, label):
    path = saved[0]
    offset, nbytes = place_of(path, kind, name, state)
    with (path / FILE).open("r+b") as file:
        file.seek(offset + nbytes - 1)
        byte = file.read(1)[0]
        file.seek(offset + nbytes - 1)
        file.write(bytes([byte ^ 4]))
    refused(rf"{FILE} is damaged: {label} does not have its checksum")


def test_a_flipped_bit_in_the_header(saved, refused):
    with (saved[0] / FILE).open("r+b") as file:
        file.seek(20)
        file.write(b"\0")
    refused(f"the header of .*{FILE}")


@pytest.mark.parametrize("left", [0, 100, -1])
def test_a_truncated_file(saved, refused, left):
    path = saved[0] / FILE
    os.truncate(path, left if left >= 0 else path.stat().st_size + left)
    refused(rf"{FILE}, which holds .* bytes, expected \d+")


def test_a_missing_file(saved, refused):
    (saved[0] / FILE).unlink()
    refused(rf"{FILE}, which holds .* cannot be read: No such file")


def test_a_file_that_leads_elsewhere(saved, refused, tmp_path):
    path = saved[0] / FILE
    path.rename(tmp_path / FILE)
    path.symlink_to(tmp_path / FILE)
    refused(rf"{FILE}, which holds .* cannot be read")


def test_a_flipped_bit_in_the_manifest(saved, refused):
    path = saved[0] / MANIFEST
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    refused("manifest.json is not the manifest of an unwall checkpoint, or is damaged")


@pytest.mark.parametrize("name", ["../elsewhere", "/etc/hostname"])
def test_a_path_that_leads_out_of_the_checkpoint(saved, refused, name):
    def change(manifest):
        moved = [
            dataclasses.replace(t, pieces=tuple(dataclasses.replace(p, file=name) for p in t.pieces)) for t in manifest.tensors
        ]
        return dataclasses.replace(manifest, files={name: manifest.files[FILE]}, tensors=tuple(moved))

    rewrite(saved[0], change)
    refused("which is not a file beside it")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"shape": (64, 63)}, r"1\.linear\.weight"),
        ({"dtype": torch.float64}, r"1\.linear\.weight"),
        ({"dtype": torch.int32}, r"1\.linear\.weight is torch.int32 in it"),
        ({"name": "other.weight"}, r"missing in it: 1\.linear\.weight; 1 not in the model: other\.weight"),
        ({"pieces": ()}, r"1\.linear\.weight is not complete, 4096 of its elements"),
    ],
)
def test_an_entry_that_is_wrong(saved, refused, change, message):
    def wrong(manifest):
        tensors = [
            dataclasses.replace(t, **change) if (t.kind, t.name) == ("param", "1.linear.weight") else t
            for t in manifest.tensors
        ]
        return dataclasses.replace(manifest, tensors=tuple(tensors))

    rewrite(saved[0], wrong)
    refused(message)


def test_a_checkpoint_of_another_model_or_optimizer(tmp_path, saved):
    path = saved[0]
    other = nn.Sequential(nn.Linear(4, 4))
    unwall.shard(other)
    with pytest.raises(unwall.CheckpointError, match=r"is of another model: of the parameters, 2 missing in it: 0\.bias"):
        unwall.load(path, other)
    model, optimizer = begin(SETUP, TIERS["host"], tmp_path)
    wrapped = unwall.wrap(torch.optim.SGD(model.parameters(), lr=1.0))
    with pytest.raises(unwall.CheckpointError, match="has the states of AdamW, the optimizer here is wrap:SGD"):
        unwall.load(path, model, wrapped)
    halves = [{"params": model[0].parameters()}, {"params": [p for m in model[1:] for p in m.parameters()]}]
    with pytest.raises(unwall.CheckpointError, match="has 1 param groups, the optimizer here 2"):
        unwall.load(path, model, unwall.AdamW(halves))
    assert differing(everything(*begin(SETUP, TIERS["host"], tmp_path)), everything(model, optimizer)) == []


class Pair(nn.Module):
    """Two layers, tied or not, with a buffer."""

    def __init__(self, tied, dtype=torch.float32):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)
        if tied:
            self.second.weight = self.first.weight
        self.register_buffer("scale", torch.full((2,), 1e30).to(dtype))


def test_two_values_for_what_is_one_parameter_now(tmp_path):
    """One of them would be lost. Where both are the same it does not matter."""
    model, tied = unwall.shard(Pair(False)), unwall.shard(Pair(True))
    path, before = unwall.save(tmp_path, model), dict(tied.state_dict())
    with pytest.raises(unwall.CheckpointError, match=r"first\.weight and second\.weight have different values .* tied here"):
        unwall.load(path, tied)
    assert differing(before, dict(tied.state_dict())) == []
    with unwall.full_params(model, write=True), torch.no_grad():
        model.second.weight.copy_(model.first.weight)
    unwall.load(unwall.save(tmp_path, model), tied)
    assert torch.equal(tied.state_dict()["second.weight"], model.state_dict()["first.weight"])


def test_values_that_another_dtype_of_the_same_size_cannot_hold(tmp_path):
    """1e30 of bf16 would be infinite in fp16."""
    model, other = unwall.shard(Pair(True, torch.bfloat16)), unwall.shard(Pair(True, torch.float16))
    with pytest.raises(unwall.CheckpointError, match=r"scale is torch\.bfloat16 in it, .*not go into torch\.float16"):
        unwall.load(unwall.save(tmp_path, model), other)
    model.scale.copy_(torch.tensor([1.5, float("nan")]))
    unwall.load(unwall.save(tmp_path, model), other)
    assert other.scale.dtype is torch.float16
    assert torch.equal(other.scale[:1].float(), model.scale[:1].float())
    assert other.scale[1].isnan()


def test_nothing_is_unpickled(saved, monkeypatch):
    def forbidden(*_, **__):
        raise AssertionError("a checkpoint was unpickled")

    path, model, optimizer, _ = saved
    monkeypatch.setattr(pickle, "load", forbidden)
    monkeypatch.setattr(pickle, "loads", forbidden)
    monkeypatch.setattr(pickle, "Unpickler", forbidden)
    monkeypatch.setattr(torch, "load", forbidden)
    unwall.load(path, model, optimizer)


def load_damaged(path):
    """Both ranks: what the load raised, and whether the model has changed."""
    torch.manual_seed(rank_and_world()[0])
    model = nn.Linear(64, 64)
    unwall.shard(model, Plan(compute_dtype=torch.float32))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    try:
        unwall.load(path, model)
        return None, None
    except unwall.CheckpointError as error:
        return str(error), differing(before, dict(model.state_dict()))


def save_plain(path):
    torch.manual_seed(3)
    model = nn.Linear(64, 64)
    unwall.shard(model, Plan(compute_dtype=torch.float32))
    unwall.save(path, model)


def test_every_rank_is_told_of_damage_that_one_of_them_found(ranks, tmp_path):
    ranks(2).run(save_plain, tmp_path)
    file = tmp_path / "checkpoint-000001" / "rank-00001.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    for error, changed in ranks(2).run(load_damaged, tmp_path):
        assert "rank-00001.safetensors is damaged: param" in error
        assert changed == []


def good_and_damaged(path, damaged):
    """Two checkpoints, the last byte of rank ``damaged`` in the second one wrong; a model that was just built with its
    optimizer; and what they should be after a load of the first one."""
    model, optimizer = begin(SETUP, TIERS["host"], path)
    step(model, optimizer, SETUP, 0)
    good, bad = (unwall.save(path / "saved", model, optimizer) for _ in range(2))
    if rank_and_world()[0] == 0:
        file = bad / f"rank-{damaged:05d}.safetensors"
        file.write_bytes(file.read_bytes()[:-1] + b"?")
    return good, bad, begin(SETUP, TIERS["host"], path), everything(model, optimizer)


def load_into_a_fresh_one(path):
    """What a rank was told, what that has changed of a model that was just built, and what is wrong after a load of a good one."""
    good, bad, (fresh, trained), expected = good_and_damaged(path, rank_and_world()[1] - 1)
    before = states_of(fresh)
    with pytest.raises(unwall.CheckpointError) as caught:
        unwall.load(bad, fresh, trained)
    changed = differing(before, states_of(fresh))
    unwall.load(good, fresh, trained)
    return str(caught.value), changed, differing(expected, everything(fresh, trained))


def states_of(model):
    """Also those that no step has touched."""
    groups = unwall.api.engine(model).groups
    return {store.label: store.tensor(False).clone() for group in groups for store in (group.param, *group.states.values())}


@pytest.mark.parametrize("world", [1, 2])
def test_what_was_read_into_a_fresh_optimizer_is_taken_back(ranks, tmp_path, world):
    for told, changed, wrong in ranks(world).run(load_into_a_fresh_one, tmp_path):
        assert "is damaged: exp_avg_sq of" in told
        assert changed == []
        assert wrong == []


def load_where_one_cannot_undo(path):
    """Rank 1 cannot take back what it had read by then. What each rank was told."""
    rank, _ = rank_and_world()
    good, bad, (fresh, trained), expected = good_and_damaged(path, 0)
    undo = Waiting.undo
    if rank == 1:
        Waiting.undo = _cannot_undo
    try:
        with pytest.raises(RuntimeError) as caught:
            unwall.load(bad, fresh, trained)
    finally:
        Waiting.undo = undo
    unwall.load(good, fresh, trained)
    return str(caught.value), differing(expected, everything(fresh, trained))


def _cannot_undo(waiting):
    raise OSError(f"group {waiting.goal.group.name} is out of reach")


def test_every_rank_is_told_of_states_that_one_could_not_set_back(ranks, tmp_path):
    for told, wrong in ranks(2).run(load_where_one_cannot_undo, tmp_path):
        assert "rank-00000.safetensors is damaged" in told
        assert "could not be set back: on rank 1" in told
        assert "is out of reach" in told
        assert wrong == []
