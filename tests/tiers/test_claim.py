"""Files of processes that live, that died, and that forked."""

import os
import threading
from pathlib import Path

import pytest

from unwall.tiers import claim as module
from unwall.tiers.claim import Claim, claim

# A process of its own that knows the file alone, not the package: it starts in no time.
CLAIMS = """
import importlib.util, pathlib, sys
spec = importlib.util.spec_from_file_location("claim", sys.argv[1])
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
owned, removed = module.claim(pathlib.Path(sys.argv[2]), rank=0)
print(owned.path.name, *[path.name for path in removed], flush=True)
sys.stdin.readline()
owned.release()
"""


@pytest.fixture
def claims_in_child(child, tmp_path):
    return lambda: child(CLAIMS, module.__file__, tmp_path)


def names(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()}


def owned_by(child) -> str:
    """The name of its file. It may have removed that of another child, which had made it and not locked it yet."""
    return child.line().split()[0]


def in_fork(work) -> int:
    """Exit status of a forked child that did ``work``."""
    pid = os.fork()
    if pid == 0:
        try:
            work()
        except BaseException:
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_two_processes_on_one_directory(claims_in_child, tmp_path):
    one, two = claims_in_child(), claims_in_child()
    first, second = owned_by(one), owned_by(two)
    assert first != second
    assert names(tmp_path) == {first, second}, "each saw that the other lives"
    assert one.finish() == two.finish() == 0
    assert names(tmp_path) == set()


def test_a_killed_process_is_cleaned_up_after_and_a_live_one_not(claims_in_child, tmp_path):
    dead, live = claims_in_child(), claims_in_child()
    left, kept = owned_by(dead), owned_by(live)
    (tmp_path / left).write_bytes(b"half a write")
    dead.kill()
    assert names(tmp_path) == {left, kept}
    owned, removed = claim(tmp_path, 0)
    assert removed == [tmp_path / left]
    assert names(tmp_path) == {kept, owned.path.name}
    owned.release()
    assert live.finish() == 0


def test_a_process_keeps_the_files_of_its_other_tiers(tmp_path):
    (one, _), (two, removed) = claim(tmp_path, 3), claim(tmp_path, 3)
    assert not removed
    assert names(tmp_path) == {one.path.name, two.path.name}
    one.release()
    one.release()
    assert names(tmp_path) == {two.path.name}
    two.release()


def test_other_files_are_none_of_our_business(tmp_path):
    for name in ("unwall-notes.txt", "swap.tier", "unwall.tier"):
        (tmp_path / name).touch()
    before = names(tmp_path)
    owned, removed = claim(tmp_path, 0)
    owned.release()
    assert not removed
    assert names(tmp_path) == before


def test_a_forked_child_does_not_remove_the_file_of_its_parent(claims_in_child, tmp_path):
    owned, _ = claim(tmp_path, 0)
    assert in_fork(owned.release) == 0
    other = claims_in_child()
    assert other.line().split()[1:] == [], "the child did not give the lock away either"
    assert owned.path.exists()
    owned.release()
    assert not owned.path.exists()


def test_a_new_file_that_was_taken_for_a_dead_one_is_made_again(tmp_path, monkeypatch):
    """Between making and locking, another process may find the file without a lock."""
    lock, gone = module.fcntl.flock, []

    def lock_too_late(descriptor: int, flags: int) -> None:
        if not gone:
            gone.extend(tmp_path.iterdir())
            gone[0].unlink()
        lock(descriptor, flags)

    monkeypatch.setattr(module.fcntl, "flock", lock_too_late)
    owned, _ = claim(tmp_path, 0)
    assert len(gone) == 1
    assert names(tmp_path) == {owned.path.name}
    owned.release()


def test_claims_at_once_do_not_remove_each_other(tmp_path):
    claims: list[Claim] = []

    def work() -> None:
        claims.extend(claim(tmp_path, 0)[0] for _ in range(25))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(claims) == 100
    assert names(tmp_path) == {owned.path.name for owned in claims}
    for owned in claims:
        owned.release()
    assert names(tmp_path) == set()


def test_a_missing_directory(tmp_path):
    with pytest.raises(ValueError, match=r"disk directory .*missing does not exist: create it"):
        claim(tmp_path / "missing", 0)


def test_a_file_in_place_of_a_directory(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"disk directory .*file is not a directory"):
        claim(tmp_path / "file", 0)


def leftover_name(directory: Path) -> str:
    """The name of a file that a dead process of this machine could have left."""
    owned, _ = claim(directory, 0)
    owned.release()
    return owned.path.name


def test_only_files_of_exactly_our_names_and_kind_are_removed(tmp_path):
    name = leftover_name(tmp_path)
    machine = name.split("-")[1]
    theirs = ["unwall-mydata.tier", f"unwall-{machine}-1-1.tier", name.replace(machine, "0" * 8), f"{name}.tier"]
    for other in theirs:
        (tmp_path / other).write_bytes(b"precious")
    kept = tmp_path / "kept"
    kept.write_bytes(b"precious")
    (tmp_path / name).symlink_to(kept)
    os.mkfifo(tmp_path / name.replace("-0.tier", "-7.tier"))
    before = names(tmp_path)
    owned, removed = claim(tmp_path, 0)
    owned.release()
    assert not removed
    assert names(tmp_path) == before
    assert kept.read_bytes() == b"precious"


def test_a_file_of_another_user_is_not_removed(tmp_path, monkeypatch):
    name = leftover_name(tmp_path)
    (tmp_path / name).touch()
    monkeypatch.setattr(module.os, "getuid", lambda: 12345)
    owned, removed = claim(tmp_path, 1)
    owned.release()
    assert not removed
    assert names(tmp_path) == {name}


def test_a_file_that_was_swapped_for_another_is_left_alone(tmp_path):
    owned, _ = claim(tmp_path, 0)
    owned.path.unlink()
    owned.path.write_bytes(b"somebody's")
    owned.release()
    assert owned.path.read_bytes() == b"somebody's"
