"""A drive that is full, or fails, during a save: nothing is left of it, older ones stay, training goes on."""

import errno
import os
import signal
import sys
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from checkpoint_tools import TIERS, Setup, begin, differing, everything, run, step
from ranks import fork_context, rank_and_world

import unwall
from unwall.checkpoint import directory, stream

sys.path.append(os.path.join(os.path.dirname(__file__), "..", "tiers"))
from tier_tools import tmpfs

SETUP = Setup(blocks=4, frozen=True)


@pytest.mark.parametrize("block", [True, False])
def test_a_full_drive(tmp_path, block):
    model, optimizer = begin(SETUP, TIERS["host"], tmp_path)
    step(model, optimizer, SETUP, 0)
    with tmpfs(tmp_path / "small", 1 << 20) as folder:
        unwall.save(folder, model, optimizer)
        filler = folder / "filler"
        free = os.statvfs(folder)
        filler.write_bytes(bytes(free.f_bavail * free.f_frsize - (64 << 10)))
        step(model, optimizer, SETUP, 1)
        with pytest.raises(OSError, match=rf"\d+ bytes\) are missing.*{folder}/checkpoint-000002") as caught:
            unwall.save(folder, model, optimizer, block=block)
        assert caught.value.errno == errno.ENOSPC
        assert [path.name for path in folder.glob("checkpoint-*")] == ["checkpoint-000001"]
        unwall.load(folder, *begin(SETUP, TIERS["host"], tmp_path))
        filler.unlink()
        step(model, optimizer, SETUP, 2)
        unwall.save(folder, model, optimizer, keep=1)
        found, _ = run(tmp_path, "host", 3, 3, load=folder)
        assert differing(everything(model, optimizer), found) == []
        expected, _ = run(tmp_path, "host", 0, 3)
        assert differing(expected, found) == []


@pytest.mark.parametrize("block", [True, False])
def test_a_drive_that_fills_up_meanwhile(tmp_path, monkeypatch, block):
    """What is free is looked at before; another process may take it."""
    model, optimizer = begin(SETUP, TIERS["disk"], tmp_path)
    with tmpfs(tmp_path / "small", 300 << 10) as folder, monkeypatch.context() as patched:
        patched.setattr("unwall.checkpoint.save._shortage", lambda *_: None)

        def save():
            found = unwall.save(folder, model, optimizer, {"large": torch.zeros(400 << 10, dtype=torch.uint8)}, block=block)
            step(model, optimizer, SETUP, 0)
            found.wait()

        with pytest.raises(OSError, match=r"No space left on device: .*\(\d+ bytes\) of .* are missing") as caught:
            save()
        assert caught.value.filename == str(folder / "checkpoint-000001" / "rank-00000.safetensors")
        assert list(folder.glob("checkpoint-*")) == []


def save_while_one_dies(rank, path):
    """Rank 1 dies in its second save. What rank 0 was told, and what is there then, for the parent to read."""
    os.environ.update(CUDA_VISIBLE_DEVICES="", GLOO_SOCKET_IFNAME="lo")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{path}/store", rank=rank, world_size=2)
    model, optimizer = begin(SETUP, TIERS["host"], path / "tier")
    unwall.save(path / "saved", model, optimizer, extra="whole")
    if rank == 1:
        stream.OutStream._write = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    try:
        unwall.save(path / "saved", model, optimizer, extra="half")
    except unwall.CheckpointError as error:
        (path / "told").write_text(str(error))
        left = sorted(found.name for found in (path / "saved").glob("checkpoint-*"))
        (path / "left").write_text(" ".join(left))
    os._exit(0)


@pytest.mark.drill
def test_a_rank_that_dies_is_everyones_error(tmp_path):
    (tmp_path / "tier").mkdir()
    both = [fork_context().Process(target=save_while_one_dies, args=(rank, tmp_path)) for rank in range(2)]
    for process in both:
        process.start()
    for process in both:
        process.join(timeout=300)
    assert [process.exitcode for process in both] == [0, -signal.SIGKILL]
    assert "rank 0 waited for another rank" in (tmp_path / "told").read_text()
    assert (tmp_path / "left").read_text() == "checkpoint-000001"
    _, extra = run(tmp_path, "host", 0, 0, load=tmp_path / "saved")
    assert extra == "whole"


def save_on_a_small_drive(folder, path):
    """On each rank: what it was told, and whether it could go on."""
    model, optimizer = begin(SETUP, TIERS["host"], path)
    step(model, optimizer, SETUP, 0)
    with pytest.raises(OSError) as caught:
        unwall.save(folder, model, optimizer)
    step(model, optimizer, SETUP, 1)
    return str(caught.value), everything(model, optimizer)


def test_every_rank_is_told_of_a_full_drive(ranks, tmp_path):
    with tmpfs(tmp_path / "small", 64 << 10) as folder:
        results = ranks(2).run(save_on_a_small_drive, folder, tmp_path)
        assert list(folder.glob("checkpoint-*")) == []
    for told, _ in results:
        assert "No space left on device" in told
        assert "bytes) are missing" in told
        assert f"{folder}/checkpoint-000001" in told
    expected, _ = ranks(2).run(run, tmp_path, "host", 0, 2)[0]
    assert differing(expected, results[0][1]) == []


def saved_where_one_fails(path, how):
    """Rank 1 cannot write its second checkpoint. What each rank was told, and what there is after a further step."""
    rank, _ = rank_and_world()
    model, optimizer = begin(SETUP, TIERS["host"], path)
    unwall.save(path / "saved", model, optimizer, extra=1)
    write = stream.OutStream._write
    if rank == 1:
        stream.OutStream._write = _failing
    told = None
    try:
        handle = unwall.save(path / "saved", model, optimizer, extra=2, block=how == "block")
        step(model, optimizer, SETUP, 0)
        handle.wait()
    except OSError as error:
        told = str(error)
        if how == "block":
            step(model, optimizer, SETUP, 0)
    finally:
        stream.OutStream._write = write
    step(model, optimizer, SETUP, 1)
    left = sorted(found.name for found in (path / "saved").glob("checkpoint-*"))
    unwall.save(path / "saved", model, optimizer, extra=3)
    return told, left, everything(model, optimizer)


def _failing(*_):
    raise OSError(errno.EIO, "the drive is gone", "somewhere")


@pytest.mark.parametrize("how", ["block", "beside"])
def test_one_rank_that_cannot_write_is_everyones_error(ranks, tmp_path, how):
    results = ranks(2).run(saved_where_one_fails, tmp_path, how)
    for told, left, _ in results:
        assert "the drive is gone" in told
        assert left == ["checkpoint-000001"]
    assert "rank 1" in results[0][0]
    found, extra = ranks(2).run(run, tmp_path, "host", 2, 2, load=tmp_path / "saved")[0]
    assert extra == 3
    assert differing(results[0][2], found) == []
    expected, _ = ranks(2).run(run, tmp_path, "host", 0, 2)[0]
    assert differing(expected, found) == []


def saved_where_nothing_can_be_removed(path):
    """Rank 1 cannot write, and rank 0 cannot remove what there is. What each rank was told."""
    model, optimizer = begin(SETUP, TIERS["host"], path)
    write, tools = stream.OutStream._write, directory.shutil
    stream.OutStream._write = _failing
    directory.shutil = SimpleNamespace(rmtree=lambda *_, **__: None)
    try:
        with pytest.raises(OSError, match="the drive is gone") as caught:
            unwall.save(path / "saved", model, optimizer)
    finally:
        stream.OutStream._write, directory.shutil = write, tools
    unwall.save(path / "saved", model, optimizer)
    return " ".join(caught.value.__notes__), [found.name for found in directory.complete(path / "saved")]


def test_every_rank_is_told_what_is_left_of_a_failed_save(ranks, tmp_path):
    for told, complete in ranks(2).run(saved_where_nothing_can_be_removed, tmp_path):
        assert "checkpoint-000001 of the save that failed could not be removed: no load sees it" in told
        assert len(complete) == 1
    assert len(list((tmp_path / "saved").glob("checkpoint-*"))) == 1
