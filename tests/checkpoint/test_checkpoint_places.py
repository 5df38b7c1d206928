"""The directory of checkpoints: odd names, links, full and read-only drives, and what is kept when a removal fails."""

import errno
import fcntl
import os
import shutil
import stat
import sys

import pytest
import torch
from checkpoint_tools import TIERS, Setup, begin, step
from torch import nn

import unwall
from unwall.checkpoint import directory
from unwall.checkpoint.directory import claim, complete, finish_removals, remove_old
from unwall.checkpoint.lots import LotReader
from unwall.checkpoint.manifest import MANIFEST

sys.path.append(os.path.join(os.path.dirname(__file__), "..", "tiers"))
from tier_tools import make_read_only, tmpfs


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return unwall.shard(nn.Linear(8, 8))


def names(folder):
    """Of what is there when all removals have ended."""
    finish_removals()
    return sorted(path.name for path in folder.iterdir() if path.name != ".lock")


def test_names_with_spaces_and_other_letters(tmp_path):
    folder = tmp_path / "größere Läufe" / "数 1\n"
    model = nn.Module()
    model.add_module("größe", nn.Linear(4, 4))
    unwall.shard(model)
    path = unwall.save(folder, model, extra={"näme": "ü"})
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with torch.no_grad(), unwall.full_params(model, write=True):
        for param in model.parameters():
            param.zero_()
    assert unwall.load(str(folder), model) == {"näme": "ü"}
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert path == folder / "checkpoint-000001"


def test_numbers_of_more_digits_follow_each_other(tmp_path, model):
    old = unwall.save(tmp_path, model, extra="old")
    old.rename(tmp_path / "checkpoint-999999999")
    assert unwall.save(tmp_path, model, extra="new").name == "checkpoint-1000000000"
    assert unwall.load(tmp_path, model) == "new"
    assert unwall.save(tmp_path, model, extra="newest", keep=2).name == "checkpoint-1000000001"
    assert names(tmp_path) == ["checkpoint-1000000000", "checkpoint-1000000001"]


def test_the_newest_is_that_of_the_largest_number_whatever_the_clock_says(tmp_path, model):
    paths = [unwall.save(tmp_path, model, extra=number) for number in range(2)]
    for path in (paths[1], *paths[1].iterdir()):
        os.utime(path, (1, 1))
    assert unwall.load(tmp_path, model) == 1
    unwall.save(tmp_path, model, extra=2, keep=2)
    assert names(tmp_path) == ["checkpoint-000002", "checkpoint-000003"]


def test_what_others_wrote_under_a_name_like_ours_stays(tmp_path, model):
    """Trainers number their checkpoints, too: only what a save of ours has left is removed."""
    theirs, left = tmp_path / "checkpoint-100000", tmp_path / "checkpoint-000005"
    for folder, name in ((theirs, "trainer_state.json"), (left, "rank-00000.safetensors")):
        folder.mkdir()
        (folder / name).write_text("{}")
    assert unwall.save(tmp_path, model, extra="ours", keep=1).name == "checkpoint-100001"
    assert names(tmp_path) == ["checkpoint-100000", "checkpoint-100001"]
    assert unwall.load(tmp_path, model) == "ours"


def test_a_link_to_the_directory(tmp_path, model):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    for number in range(3):
        unwall.save(tmp_path / "link", model, extra=number, keep=2)
    assert names(tmp_path / "real") == ["checkpoint-000002", "checkpoint-000003"]
    assert unwall.load(tmp_path / "link", model) == 2


def test_a_checkpoint_that_was_moved_to_another_drive(tmp_path, model):
    """With a link in its place it is still the newest, its number is taken, and no ``keep`` removes it."""
    saved, other = tmp_path / "saved", tmp_path / "other"
    unwall.save(saved, model, extra=1)
    unwall.save(saved, model, extra=2)
    (saved / "checkpoint-000002").rename(other)
    (saved / "checkpoint-000002").symlink_to(other)
    assert unwall.load(saved, model) == 2
    assert unwall.save(saved, model, extra=3, keep=1).name == "checkpoint-000003"
    assert names(saved) == ["checkpoint-000002", "checkpoint-000003"]
    assert unwall.load(other, model) == 2
    shutil.rmtree(other)  # or its drive is not there
    assert unwall.load(saved, model) == 3
    assert unwall.save(saved, model).name == "checkpoint-000004"


def test_two_saves_at_once_into_one_directory(tmp_path, model):
    """Of another process, say: neither takes the other's number, nor removes what the other has under way."""
    theirs = claim(tmp_path)
    (theirs.path / "half").write_bytes(b"written")
    assert unwall.save(tmp_path, model, extra="ours", keep=1).name == "checkpoint-000002"
    assert names(tmp_path) == ["checkpoint-000001", "checkpoint-000002"]
    assert unwall.load(tmp_path, model) == "ours"
    theirs.finish(b"{}")
    assert complete(tmp_path) == [tmp_path / "checkpoint-000001", tmp_path / "checkpoint-000002"]
    assert unwall.load(tmp_path, model) == "ours"


def test_a_process_that_was_forked_during_a_save_does_not_keep_its_locks(tmp_path):
    """A worker of a data loader, say, while an old checkpoint is removed: the next save would wait for its end."""
    ours = claim(tmp_path)
    reading, writing = os.pipe()
    with directory._locked(tmp_path):
        child = os.fork()
        if child == 0:
            os.close(writing)
            os.read(reading, 1)  # until the parent is done
            os._exit(0)
    try:
        ours._let_go()
        for file in (ours.path / "writing", tmp_path / ".lock"):
            descriptor = os.open(file, os.O_RDWR)
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)  # BlockingIOError where somebody has it
            os.close(descriptor)
    finally:
        os.write(writing, b".")
        os.waitpid(child, 0)
        os.close(reading)
        os.close(writing)


def test_a_directory_that_cannot_be_written(tmp_path, model):
    with tmpfs(tmp_path / "small", 1 << 20) as folder:
        unwall.save(folder, model, extra="there")
        make_read_only(folder)
        for block in (True, False):
            with pytest.raises(OSError, match=str(folder)) as caught:
                unwall.save(folder, model, block=block)
            assert caught.value.errno == errno.EROFS
        assert unwall.load(folder, model) == "there"
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(FileExistsError, match=str(tmp_path / "file")):
        unwall.save(tmp_path / "file", model)


def test_an_old_one_that_cannot_be_removed_keeps_no_other(tmp_path, model, monkeypatch):
    for number in range(3):
        unwall.save(tmp_path, model, extra=number)
    sync = directory.sync_directory

    def failing(path):
        if path.name == "checkpoint-000001" and not (path / MANIFEST).exists():
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        sync(path)

    monkeypatch.setattr(directory, "sync_directory", failing)
    with pytest.warns(RuntimeWarning, match="the old checkpoint .*checkpoint-000001 cannot be removed: .*Input/output error"):
        unwall.save(tmp_path, model, extra=3, keep=1)
    assert names(tmp_path) == ["checkpoint-000001", "checkpoint-000004"]
    assert unwall.load(tmp_path, model) == 3
    unwall.save(tmp_path, model, extra=4, keep=1)
    assert names(tmp_path) == ["checkpoint-000005"]


def test_an_interrupt_while_old_ones_are_removed_costs_nothing_new(tmp_path, model, monkeypatch):
    unwall.save(tmp_path, model, extra="old")

    def interrupted(*args):
        remove_old(*args)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("unwall.checkpoint.writing.remove_old", interrupted)
        with pytest.raises(KeyboardInterrupt):
            unwall.save(tmp_path, model, extra="new", keep=1)
    assert names(tmp_path) == ["checkpoint-000002"]
    assert unwall.load(tmp_path, model) == "new"


def test_a_drive_that_is_full_when_the_manifest_comes(tmp_path, model, monkeypatch):
    unwall.save(tmp_path, model, extra="old")
    write = os.write

    def full(descriptor, data):
        if bytes(data[:8]) == b'{"crc32"':
            return write(descriptor, data[:8])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(os, "write", full)
        with pytest.raises(OSError, match=r"No space left on device: \d+ bytes of \d+ are missing: .*manifest.json") as caught:
            unwall.save(tmp_path, model, extra="new")
    assert caught.value.errno == errno.ENOSPC
    assert names(tmp_path) == ["checkpoint-000001"]
    assert unwall.load(tmp_path, model) == "old"


def test_what_fails_after_the_manifest_is_in_place_takes_it_away_first(tmp_path, model, monkeypatch):
    """Otherwise a crash in the midst of the removal would leave half of a checkpoint that looks complete."""
    order = []
    rmtree = shutil.rmtree

    def seen(path, **options):
        order.append((path / MANIFEST).exists())
        rmtree(path, **options)

    claimed = claim(tmp_path)
    monkeypatch.setattr(directory.shutil, "rmtree", seen)
    with monkeypatch.context() as patched:
        calls = iter([None, OSError(errno.EIO, "gone")])

        def failing(_):
            error = next(calls)
            if error is not None:
                raise error

        patched.setattr(directory, "sync_directory", failing)
        with pytest.raises(OSError, match="gone"):
            claimed.finish(b"{}")
    assert (claimed.path / MANIFEST).exists()
    claimed.discard()
    assert order == [False]
    assert names(tmp_path) == []


def test_the_directory_itself_goes_during_a_save(tmp_path, monkeypatch):
    """The error is that of the file, and training goes on."""
    setup = Setup(blocks=2)
    model, optimizer = begin(setup, TIERS["host"], tmp_path / "tier")
    folder = tmp_path / "saved"

    def gone(*_):
        shutil.rmtree(folder)
        raise OSError(errno.EIO, "the drive is gone")

    with monkeypatch.context() as patched:
        patched.setattr("unwall.checkpoint.stream.OutStream._write", gone)
        pending = unwall.save(folder, model, optimizer, block=False)
        with pytest.raises(OSError, match="the drive is gone"):
            pending.wait()
    step(model, optimizer, setup, 0)
    unwall.save(folder, model, optimizer, extra="again")
    assert unwall.load(folder, model, optimizer) == "again"


def test_a_directory_of_the_same_name_that_came_meanwhile_gets_no_manifest(tmp_path, monkeypatch):
    """Otherwise there would be a checkpoint that looks complete, and has no files."""
    model, _ = begin(Setup(blocks=2), TIERS["host"], tmp_path)
    folder = tmp_path / "saved"
    read = LotReader.read

    def removed_meanwhile(reader, lot):
        monkeypatch.undo()
        shutil.rmtree(folder)
        (folder / "checkpoint-000001").mkdir(parents=True)
        return read(reader, lot)

    monkeypatch.setattr(LotReader, "read", removed_meanwhile)
    with pytest.raises(FileNotFoundError, match=r"rank-00000\.safetensors") as caught:
        unwall.save(folder, model)
    assert "the file was removed while it was written" in str(caught.value)
    assert complete(folder) == []
    unwall.save(folder, model, extra="again")
    assert unwall.load(folder, model) == "again"


def test_a_path_that_is_no_directory(tmp_path, model):
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to(tmp_path / "nothing")
    for name, what in {
        "file": "this is no directory",
        "file/in it": "no directory",
        "link": "a link that leads nowhere",
    }.items():
        with pytest.raises((FileExistsError, NotADirectoryError), match=what):
            unwall.save(tmp_path / name, model)


def test_a_file_system_without_locks_and_without_directories_on_the_disk(tmp_path, model, monkeypatch):
    """Some network file systems: saves go on, with a warning, and leave alone what may be another process's."""
    fsync = os.fsync

    def no_locks(*_):
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    def of_files(descriptor):
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        fsync(descriptor)

    (tmp_path / "checkpoint-000001").mkdir()
    (tmp_path / "checkpoint-000001" / "writing").touch()
    monkeypatch.setattr(directory.fcntl, "flock", no_locks)
    monkeypatch.setattr(os, "fsync", of_files)
    for extra in (1, 2):
        with pytest.warns(RuntimeWarning, match=r"has no locks \(flock: Function not implemented\): let no two processes"):
            unwall.save(tmp_path, model, extra=extra, keep=1)
    assert unwall.load(tmp_path, model) == 2
    assert names(tmp_path) == ["checkpoint-000001", "checkpoint-000003"]


def test_a_directory_of_weights_is_no_checkpoint(tmp_path, model):
    unwall.export_weights(model, tmp_path)
    with pytest.raises(FileNotFoundError, match=r"has no complete checkpoint in it \(it has weights: unwall\.load_weights"):
        unwall.load(tmp_path, model)
