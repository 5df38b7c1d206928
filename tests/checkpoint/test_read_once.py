"""A load reads each byte once where the new values can wait beside the old ones, which stay as they are if anything is wrong."""

import itertools
import os
import time
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from checkpoint_tools import TIERS, differing, everything
from torch import nn

import unwall
from unwall.checkpoint import block_reading, waiting
from unwall.checkpoint.in_file import InFile
from unwall.checkpoint.reader import CheckpointFiles
from unwall.checkpoint.restoring import Restorer
from unwall.native.library import DiskError
from unwall.plans import Plan

WIDTH = 1100
"""Of three layers: states of three blocks of a file, so that blocks and chunks end in the middle of tensors."""


class Layers(nn.Sequential):
    def __init__(self):
        torch.manual_seed(0)
        super().__init__(*[nn.Linear(WIDTH, WIDTH) for _ in range(3)])


def train(fields, folder, dtype=torch.bfloat16, steps=1, model=None):
    model = unwall.shard(Layers() if model is None else model, Plan(**fields, disk=folder, compute_dtype=dtype))
    optimizer = unwall.AdamW(model.parameters(), lr=1e-2)
    for number in range(steps):
        torch.manual_seed(number)
        model(torch.randn(2, WIDTH)).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("once")
    model, optimizer = train(TIERS["host"], folder)
    return unwall.save(folder / "saved", model, optimizer), everything(model, optimizer)


@pytest.fixture
def bytes_read(monkeypatch):
    """Of the large reads, by whether they were made."""
    found = Counter()
    fetch = InFile.fetch

    def counted(file, offset, nbytes, into):
        found["bytes"] += nbytes
        return fetch(file, offset, nbytes, into)

    monkeypatch.setattr(InFile, "fetch", counted)
    monkeypatch.setattr(waiting, "SLOW_MEMORY", 0)
    return found


@pytest.mark.parametrize("steps", [0, 1], ids=["resumed", "stepped"])
@pytest.mark.parametrize("tier", ["device", "host", "disk", "mixed"])
def test_every_byte_is_read_once(saved, bytes_read, tmp_path, tier, steps):
    path, expected = saved
    model, optimizer = train(TIERS[tier], tmp_path, steps=2 * steps)
    unwall.load(path, model, optimizer)
    assert differing(expected, everything(model, optimizer)) == []
    whole = (path / "rank-00000.safetensors").stat().st_size
    assert 12 * sum(param.numel() for param in model.parameters()) <= bytes_read["bytes"] <= whole + 20_000  # and generators


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_other_dtypes_than_those_of_the_save(saved, bytes_read, tmp_path, dtype):
    path, expected = saved
    model, optimizer = train(TIERS["host"], tmp_path, dtype, steps=2)
    unwall.load(path, model, optimizer)
    assert differing(expected, everything(model, optimizer)) == []
    assert bytes_read["bytes"] <= (path / "rank-00000.safetensors").stat().st_size + 20_000


def test_few_buffers_are_enough(saved, monkeypatch, tmp_path):
    """Then blocks are read again for chunks that had none."""
    monkeypatch.setattr(block_reading, "BUFFERS", 1)
    monkeypatch.setattr(block_reading, "FOR_THE_NEXT", 1)
    monkeypatch.setattr(block_reading, "CHUNK_ELEMENTS", 1 << 18)
    path, expected = saved
    model, optimizer = train(TIERS["disk"], tmp_path, steps=0)
    unwall.load(path, model, optimizer)
    assert differing(expected, everything(model, optimizer)) == []


def states(model):
    """Also those that no step has touched."""
    groups = unwall.api.engine(model).groups
    stores = [store for group in groups for store in (group.param, *group.states.values()) if store is not None]
    found = {store.label: store.tensor(write=False).clone() for store in stores}
    return {**found, **{name: value.clone() for name, value in model.state_dict().items()}}


@pytest.mark.parametrize("steps", [0, 2], ids=["resumed", "stepped"])
@pytest.mark.parametrize("tier", ["device", "disk"])
def test_damage_in_the_last_byte_leaves_everything_as_it_was(saved, tmp_path, tier, steps):
    path, expected = saved
    model, optimizer = train(TIERS[tier], tmp_path, steps=steps)
    before, live = states(model), {name: ledger.live_bytes for name, ledger in unwall.api.engine(model).tiers.ledgers.items()}
    file = path / "rank-00000.safetensors"
    with file.open("r+b") as opened:
        opened.seek(-1, os.SEEK_END)
        last = opened.read(1)
        opened.seek(-1, os.SEEK_END)
        opened.write(bytes([last[0] ^ 1]))
        opened.flush()
        with pytest.raises(unwall.CheckpointError, match="does not have its checksum"):
            unwall.load(path, model, optimizer)
        opened.seek(-1, os.SEEK_END)
        opened.write(last)
    assert differing(before, states(model)) == []
    ledgers = unwall.api.engine(model).tiers.ledgers
    assert {name: ledger.live_bytes for name, ledger in ledgers.items()} == live
    unwall.load(path, model, optimizer)
    assert differing(expected, everything(model, optimizer)) == []


def test_what_cannot_be_set_back_keeps_no_other_state_from_it(saved, monkeypatch, tmp_path):
    """A drive that fails while a failed load is undone: all other states are as before, and those that are not are named."""
    path, expected = saved
    model, optimizer = train(TIERS["disk"], tmp_path, steps=0)
    before = states(model)
    broken = [f"{state} of group {unwall.api.engine(model).groups[0].name}" for state in ("exp_avg", "exp_avg_sq")]
    put, undoing = Restorer._put, []

    def failing(restorer, held, start, values):
        if undoing and held.block.label in broken:
            raise DiskError(5, f"writing the {held.block.label} failed", "drive", start, values.nbytes)
        put(restorer, held, start, values)

    monkeypatch.setattr(Restorer, "_put", failing)
    close = CheckpointFiles.close
    file = path / "rank-00000.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with monkeypatch.context() as patched:
        patched.setattr(CheckpointFiles, "close", lambda files: (undoing.append(True), close(files)))
        with pytest.raises(RuntimeError, match=r"checksum.* But .*could not be set back: on rank 0 2 states") as caught:
            unwall.load(path, model, optimizer)
    file.write_bytes(content)
    assert all(label in str(caught.value) for label in broken)
    assert not isinstance(caught.value, unwall.CheckpointError)  # which says that nothing was changed
    assert isinstance(caught.value.__cause__, unwall.CheckpointError)
    assert set(differing(before, states(model))) == set(broken)
    undoing.clear()
    unwall.load(path, model, optimizer)
    assert differing(expected, everything(model, optimizer)) == []


def test_no_more_memory_than_the_budget_has(saved, tmp_path):
    """The shadows of the updates ahead keep theirs, too."""
    path, expected = saved
    model, optimizer = train(TIERS["host"], tmp_path, steps=2)
    ledger = unwall.api.engine(model).tiers.host.ledger
    ledger.budget_bytes = ledger.live_bytes
    unwall.load(path, model, optimizer)
    assert ledger.peak_bytes == ledger.live_bytes
    assert differing(expected, everything(model, optimizer)) == []


def test_floats_that_do_not_begin_at_a_multiple_of_their_size(tmp_path):
    def build():
        model = Layers()
        model.register_buffer("odd", torch.arange(3, dtype=torch.uint8))
        return model

    model, optimizer = train(TIERS["host"], tmp_path, model=build())
    path, expected = unwall.save(tmp_path / "saved", model, optimizer), everything(model, optimizer)
    for fields in (TIERS["host"], TIERS["disk"]):
        fresh, trained = train(fields, tmp_path, steps=0, model=build())
        unwall.load(path, fresh, trained)
        assert differing(expected, everything(fresh, trained)) == []


def test_memory_that_comes_slowly_is_not_taken(saved, monkeypatch, tmp_path):
    monkeypatch.setattr(waiting, "SLOW_MEMORY", float("inf"))
    monkeypatch.setattr(waiting, "TIMED_BYTES", 1)
    path, expected = saved
    model, optimizer = train(TIERS["host"], tmp_path, steps=0)
    ledger = unwall.api.engine(model).tiers.host.ledger
    before = ledger.live_bytes
    ledger.reset_peak()
    unwall.load(path, model, optimizer)
    largest = max(store.nbytes for group in unwall.api.engine(model).groups for store in group.states.values())
    assert ledger.peak_bytes - before <= largest
    assert differing(expected, everything(model, optimizer)) == []


def test_busy_processors_do_not_make_memory_slow(saved, bytes_read, monkeypatch, tmp_path):
    """Only the time that was worked counts: each look at the clock is an hour after the one before."""
    path, expected = saved
    hours = itertools.count()
    monkeypatch.setattr(waiting, "SLOW_MEMORY", 1.0)
    monkeypatch.setattr(waiting, "TIMED_BYTES", 1)
    slow = SimpleNamespace(perf_counter=lambda: 1e9 * next(hours), process_time=time.process_time)
    monkeypatch.setattr(waiting, "time", slow)
    model, optimizer = train(TIERS["host"], tmp_path, steps=0)
    unwall.load(path, model, optimizer)
    assert bytes_read["bytes"] <= (path / "rank-00000.safetensors").stat().st_size + 20_000
    assert differing(expected, everything(model, optimizer)) == []


def test_buffers_and_what_is_kept_of_the_verified_are_bounded_together(saved, monkeypatch, tmp_path):
    """Some states are read once through buffers, the others verified before."""
    path, expected = saved
    made = []
    init = block_reading.BlockReading.__init__

    def seen(reading, files, goals):
        init(reading, files, goals)
        made.append((files.kept_blocks, reading._buffers))

    spares, turns = waiting.Room.spares, itertools.count()
    monkeypatch.setattr(waiting.Room, "spares", lambda room, homes: spares(room, homes) if next(turns) % 2 else None)
    monkeypatch.setattr(block_reading.BlockReading, "__init__", seen)
    model, optimizer = train(TIERS["disk"], tmp_path, steps=2)
    unwall.load(path, model, optimizer)
    ((kept, buffers),) = made
    assert kept > 0
    assert kept + buffers == block_reading.BUFFERS
    assert differing(expected, everything(model, optimizer)) == []


def ordered(names):
    """Layers of several blocks of a file and a small one, in this order."""
    torch.manual_seed(0)
    made = {f"large{number}": nn.Linear(2048, 2048, bias=False) for number in range(3)} | {"small": nn.Linear(2048, 64)}
    model = nn.Module()
    for name in names:
        model.add_module(name, made[name])
    return model


def test_states_in_another_order_than_in_the_file(tmp_path):
    """What lies beside the first states comes ahead of its turn, and its turn must not put it again."""
    names = ["small", "large0", "large1", "large2"]
    model = unwall.shard(ordered(names), Plan(**TIERS["host"]))
    optimizer = unwall.AdamW(model.parameters())
    for param in model.parameters():
        for state in ("exp_avg", "exp_avg_sq"):
            optimizer.states(param)[state] = torch.rand(param.shape)
        optimizer.states(param)["step"] = 3
    path = unwall.save(tmp_path / "saved", model, optimizer)
    other = unwall.shard(ordered([*names[1:], names[0]]), Plan(**TIERS["disk"], disk=tmp_path))
    loaded = unwall.AdamW(other.parameters())
    unwall.load(path, other, loaded)
    there = dict(other.named_parameters())
    for name, param in model.named_parameters():
        for state in ("exp_avg", "exp_avg_sq", "master"):
            assert torch.equal(optimizer.states(param)[state], loaded.states(there[name])[state]), (name, state)


class Pair(nn.Module):
    def __init__(self, tied):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False)
        if tied:
            self.second.weight = self.first.weight


@pytest.mark.parametrize("read_bytes", [block_reading.READ_BYTES, 4096], ids=["at once", "page by page"])
def test_tied_when_saved_and_not_when_loaded(tmp_path, monkeypatch, read_bytes):
    monkeypatch.setattr(block_reading, "READ_BYTES", read_bytes)
    path = unwall.save(tmp_path / "saved", unwall.shard(Pair(True), Plan(**TIERS["host"])), None)
    model = unwall.shard(Pair(False), Plan(**TIERS["host"]))
    unwall.load(path, model, None)
    values = model.state_dict()
    assert torch.equal(values["first.weight"], values["second.weight"])


def test_a_load_that_fails_leaves_states_that_were_set_by_hand(tmp_path):
    model, optimizer = unwall.shard(Pair(False), Plan(**TIERS["host"])), None
    optimizer = unwall.AdamW(model.parameters())
    path = unwall.save(tmp_path / "saved", model, optimizer)
    optimizer.states(model.first.weight)["exp_avg"] = torch.ones(64, 64)
    (file,) = path.glob("*.safetensors")
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(unwall.CheckpointError, match="Nothing was changed"):
        unwall.load(path, model, optimizer)
    assert torch.equal(optimizer.states(model.first.weight)["exp_avg"], torch.ones(64, 64))
