"""What is read twice goes past the page cache where that is faster: the same bytes, and the same errors."""

import os

import pytest
import torch
from checkpoint_tools import TIERS, Setup, begin, differing, everything, step

import unwall
from unwall.checkpoint import reader, waiting
from unwall.checkpoint.copying import copy_flat
from unwall.checkpoint.in_file import Bounce, EndedError, InFile

SETUP = Setup(blocks=4, frozen=True)


@pytest.fixture(params=[True, False], ids=["past it", "through it"])
def past_cache(request, monkeypatch):
    """Loads read twice, and go one way, whatever their size and the drive's speed."""

    def decided(files, _, blocks):
        files.past_cache = request.param
        return blocks

    monkeypatch.setattr(reader.CheckpointFiles, "_try_both", decided)
    monkeypatch.setattr(reader, "TRIED_FROM", 0)
    monkeypatch.setattr(waiting.Room, "spares", lambda *_: None)
    return request.param


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_a_load_gives_what_was_saved(tmp_path, past_cache, tier):
    model, optimizer = begin(SETUP, TIERS[tier], tmp_path)
    step(model, optimizer, SETUP, 0)
    path = unwall.save(tmp_path / "saved", model, optimizer)
    expected = everything(model, optimizer)
    step(model, optimizer, SETUP, 1)
    assert differing(expected, everything(model, optimizer))
    unwall.load(path, model, optimizer)
    assert differing(expected, everything(model, optimizer)) == []


def test_a_flipped_bit_is_found_before_anything_changes(tmp_path, past_cache):
    model, optimizer = begin(SETUP, TIERS["host"], tmp_path)
    path = unwall.save(tmp_path / "saved", model, optimizer)
    step(model, optimizer, SETUP, 0)
    before = everything(model, optimizer)
    with (path / "rank-00000.safetensors").open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        last = file.read(1)[0]
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last ^ 1]))
    with pytest.raises(unwall.CheckpointError, match="does not have its checksum"):
        unwall.load(path, model, optimizer)
    assert differing(before, everything(model, optimizer)) == []


@pytest.mark.parametrize("blocks", [1, 23, 120])
def test_both_ways_are_tried_once_there_is_enough_to_read(tmp_path, monkeypatch, blocks):
    checked, ways = [], []

    def check(files, _, runs):
        checked.append(runs)
        ways.append(files.past_cache)
        return 3.0 if not files.past_cache else 1.0

    monkeypatch.setattr(reader, "check_files", lambda *_: None)
    monkeypatch.setattr(reader, "runs_of_blocks", lambda _: {("file", number): number for number in range(blocks)})
    monkeypatch.setattr(reader.CheckpointFiles, "_check", check)
    with reader.CheckpointFiles(tmp_path, None) as files:
        files.verify([])
        assert files.past_cache == (blocks > 1)
    assert sorted(checked) == list(range(blocks))
    assert sum(ways) == {1: 0, 23: 23, 120: 120 - 8}[blocks]


@pytest.mark.parametrize(("offset", "nbytes"), [(0, 4096), (1, 9000), (4095, 2), (12288, 712), (0, 13000)])
def test_any_run_of_a_file(tmp_path, offset, nbytes):
    content = torch.arange(13000, dtype=torch.int32).to(torch.uint8)
    (tmp_path / "file").write_bytes(content.numpy().tobytes())
    file, bounce = InFile(tmp_path / "file"), Bounce(16384)
    first = file.fetch(offset, nbytes, bounce)
    assert torch.equal(bounce.bytes[first : first + nbytes], content[offset : offset + nbytes])
    with pytest.raises(EndedError, match="ends at byte 13000"):
        file.fetch(12000, 1001, bounce)
    with pytest.raises(EndedError, match="ends at byte 13000"):
        file.fill(12000, bounce.view[:1001])
    file.close()


def test_copies_want_as_many_elements_without_gaps():
    target, source = torch.zeros(4), torch.arange(4.0)
    copy_flat(target, source)
    assert torch.equal(target, source)
    copy_flat(target, source.to(torch.bfloat16).neg())
    assert torch.equal(target, -source)
    for wrong in (torch.zeros(3), torch.zeros(8)[::2]):
        with pytest.raises(ValueError, match="flat tensors of the same size"):
            copy_flat(target, wrong)
