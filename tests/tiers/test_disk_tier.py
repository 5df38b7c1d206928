"""The disk tier: directories, budget and growth, churn, and the end of its files."""

import ctypes
import gc
import os
import random
import shutil

import pytest
from tier_tools import KIB, MIB, PAGE, Tiers, make_read_only, pattern, tmpfs

from unwall.native.disk import DiskEngine
from unwall.native.memory import HostMemory
from unwall.tiers import disk as disk_module
from unwall.tiers.block import DiskBlock, FreedError
from unwall.tiers.claim import claim
from unwall.tiers.disk import DiskTier
from unwall.tiers.ledger import BudgetError
from unwall.tiers.links import Links

LEFT_BEHIND = """
import sys
from unwall.tiers.disk import DiskTier
kept = DiskTier([sys.argv[1]])
kept.allocate(5000)
dropped = DiskTier([sys.argv[1]], rank=1)
dropped.itself = dropped  # a cycle: only the garbage collector, or the exit, finds it
del dropped
raise SystemExit(3)
"""

KILLED = """
import sys
from unwall.tiers.device import DeviceTier
from unwall.tiers.disk import DiskTier
from unwall.tiers.host import HostTier
from unwall.tiers.links import Links
disk, host = DiskTier([sys.argv[1]]), HostTier()
disk.engine.throttle("write", 1 << 20)
ticket = Links(DeviceTier(), host, disk).copy(host.allocate(64 << 20), disk.allocate(64 << 20))
print(disk.paths[0], ticket.done(), flush=True)
sys.stdin.readline()
"""


@pytest.fixture
def engine():
    with DiskEngine(threads=2) as made:
        yield made


def size(tier: DiskTier) -> int:
    return sum(path.stat().st_size for path in tier.paths)


def test_a_missing_directory_is_named_and_nothing_is_left_in_the_others(tmp_path, engine):
    with pytest.raises(ValueError, match=r"disk directory .*missing does not exist: create it"):
        DiskTier([tmp_path, tmp_path / "missing"], engine=engine)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("wrong", [[], "/tmp"])
def test_directories_come_as_a_list(wrong, engine):
    with pytest.raises(ValueError, match="needs a list of one directory or more"):
        DiskTier(wrong, engine=engine)


def test_a_read_only_directory(tmp_path, engine):
    with tmpfs(tmp_path / "ro", MIB) as directory:
        make_read_only(directory)
        with pytest.raises(PermissionError, match=r"disk directory cannot be written \(Read-only file system\).*ro'"):
            DiskTier([directory], engine=engine)


def test_the_budget_is_a_quota(tmp_path, engine):
    tier = DiskTier([tmp_path], budget_bytes=10 * PAGE + 100, engine=engine)
    block = tier.allocate(9 * PAGE + 1, "moments")
    assert tier.ledger.live_bytes == 10 * PAGE, "what the disk holds, padding and all"
    with pytest.raises(BudgetError, match=r"disk tier: more needs 4\.0 KiB \(4096 bytes\), but 40\.0 KiB .*disk_bytes"):
        tier.allocate(1, "more")
    assert size(tier) <= 10 * PAGE + 100
    tier.free(block)
    tier.allocate(10 * PAGE)
    tier.close()


def test_a_budget_of_zero(tmp_path, engine):
    tier = DiskTier([tmp_path], budget_bytes=0, engine=engine)
    with pytest.raises(BudgetError, match="budget of 0 B"):
        tier.allocate(1)
    tier.close()


def test_the_file_grows_in_steps_and_keeps_within_the_budget(tmp_path, engine):
    tier = DiskTier([tmp_path], budget_bytes=10 * MIB, engine=engine, growth_bytes=4 * MIB)
    assert size(tier) == 0
    sizes, held = [], []
    for _ in range(10):
        held.append(tier.allocate(MIB))
        sizes.append(size(tier) // MIB)
    assert sizes == [4, 4, 4, 4, 8, 8, 8, 8, 10, 10]
    assert tier.paths[0].stat().st_blocks * 512 >= 10 * MIB, "space is reserved, not promised"
    tier.close()


def test_what_is_spare_leaves_half_of_the_drive_and_keeps_to_the_budget(tmp_path, engine, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=8 * MIB))
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    unlimited = DiskTier([tmp_path], engine=engine, growth_bytes=4 * MIB)
    assert unlimited.spare_bytes() == 4 * MIB
    unlimited.allocate(MIB)
    assert unlimited.spare_bytes() == (8 + 3) * MIB // 2  # of the file's first 4 MiB three are free
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert unlimited.spare_bytes() == (4 + 3) * MIB // 2
    assert DiskTier([tmp_path], 3 * MIB, rank=1, engine=engine).spare_bytes() == 2 * MIB
    assert DiskTier([tmp_path], MIB, rank=2, engine=engine).spare_bytes() == MIB


def test_growth_ahead_of_need_does_not_take_the_budget_from_a_large_block(tmp_path, engine):
    tier = DiskTier([tmp_path], budget_bytes=5 * MIB, engine=engine, growth_bytes=4 * MIB)
    tier.allocate(PAGE)
    tier.allocate(5 * MIB - PAGE)
    assert size(tier) == 5 * MIB
    tier.close()


def test_churn_neither_fragments_nor_mixes_up(tiers: Tiers):
    """Blocks of all sizes come and go under a budget that is nearly used up: each fits, and keeps its bytes."""
    budget = 4 * MIB
    rng = random.Random(0)
    live: list[tuple[DiskBlock, int, int]] = []
    split = 0
    for seed in range(150):
        nbytes = rng.randint(1, 600 * KIB)
        while live and sum(-(-n // PAGE) * PAGE for _, n, _ in live) + nbytes + PAGE > budget:
            block, n, old = live.pop(rng.randrange(len(live)))
            if len(block.extents) > 1:
                assert tiers.content(block).equal(pattern(n, old))
            tiers.disk.free(block)
        block = tiers.filled("disk", pattern(nbytes, seed))
        split += len(block.extents) > 1
        live.append((block, nbytes, seed))
    assert split, "no block was ever put together from holes: the test shows nothing"
    assert size(tiers.disk) == budget
    for block, nbytes, seed in live:
        assert tiers.content(block).equal(pattern(nbytes, seed))
        tiers.disk.free(block)
    assert tiers.disk.ledger.live_bytes == 0


def test_several_drives_share_the_bytes(tiers: Tiers, tmp_path, engine):
    drives = [tmp_path / name for name in ("a", "b", "c")]
    for drive in drives:
        drive.mkdir()
    striped = DiskTier(drives, engine=engine, growth_bytes=MIB)
    data = pattern(21 * MIB + 5)
    source, target, block = tiers.filled("host", data), tiers.host.allocate(data.numel()), striped.allocate(data.numel())
    with Links(tiers.device, tiers.host, striped) as links:
        links.copy(source, block).wait()
        links.copy(block, target).wait()
    assert target.data.equal(data)
    assert [path.parent for path in striped.paths] == drives
    assert all(path.stat().st_size >= 4 * MIB for path in striped.paths)
    striped.close()
    assert not any(list(drive.iterdir()) for drive in drives)


def test_illegal_steps(tmp_path, engine):
    tier, other = DiskTier([tmp_path], engine=engine), DiskTier([tmp_path], engine=engine)
    for nbytes in (0, -1):
        with pytest.raises(ValueError, match=f"disk tier: a block has at least one byte, got {nbytes}"):
            tier.allocate(nbytes)
    block = tier.allocate(100, "w")
    with pytest.raises(ValueError, match="was not allocated by this disk tier"):
        other.free(block)
    tier.free(block)
    for step in (lambda: tier.free(block), lambda: tier.read(block, 0, PAGE, PAGE)):
        with pytest.raises(FreedError, match="disk block 'w' of 100 bytes was already freed"):
            step()
    assert tier.ledger.live_bytes == 0
    tier.close()
    tier.close()
    with pytest.raises(RuntimeError, match="this disk tier is closed"):
        tier.allocate(1)
    other.close()


def test_a_place_is_not_handed_out_under_a_request(tiers: Tiers):
    """A block is freed while it is being read: the bytes that come in are its own, not those of the next block."""
    data = pattern(MIB, 1)
    block, into = tiers.filled("disk", data), tiers.host.allocate(MIB)
    tiers.hold_reads()
    ticket = tiers.links.copy(block, into)
    tiers.let_reads_go(after_seconds=0.05)
    tiers.disk.free(block)
    assert tiers.filled("disk", pattern(MIB, 2)).extents == block.extents
    ticket.wait()
    assert into.data.equal(data)


def test_files_go_at_close_and_when_the_tier_is_dropped(tmp_path):
    tier = DiskTier([tmp_path])
    tier.allocate(100)
    tier.close()
    assert not list(tmp_path.iterdir())
    tier = DiskTier([tmp_path])
    assert list(tmp_path.iterdir())
    del tier
    gc.collect()
    assert not list(tmp_path.iterdir())


def test_files_go_when_the_shared_engine_was_closed_first(tmp_path):
    engine = DiskEngine(threads=1)
    tier = DiskTier([tmp_path], engine=engine)
    engine.close()
    tier.close()
    assert not list(tmp_path.iterdir())


def test_files_go_at_exit(child, tmp_path):
    assert child(LEFT_BEHIND, tmp_path).finish() == 3
    assert not list(tmp_path.iterdir())


def test_a_forked_child_leaves_the_tier_to_its_parent(tiers: Tiers):
    block = tiers.filled("disk", pattern(PAGE))
    pid = os.fork()
    if pid == 0:
        try:
            tiers.disk.close()
        except BaseException:
            os._exit(1)
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    assert tiers.disk.paths[0].exists()
    assert tiers.content(block).equal(pattern(PAGE))


def test_a_process_killed_in_mid_write_is_cleaned_up_at_the_next_start(child, tiers: Tiers, tmp_path):
    block = tiers.filled("disk", pattern(PAGE))  # a live process on the same directory
    killed = child(KILLED, tmp_path)
    path, done = killed.line().split()
    assert done == "False"
    killed.kill()
    assert os.path.getsize(path) >= 64 * MIB
    again = DiskTier([tmp_path], engine=tiers.engine)
    assert [str(removed) for removed in again.removed] == [path]
    assert not os.path.exists(path)
    again.close()
    assert list(tmp_path.iterdir()) == tiers.disk.paths
    assert tiers.content(block).equal(pattern(PAGE))


def test_a_link_put_in_place_of_the_claimed_file_is_not_followed(tmp_path, monkeypatch):
    """Between claiming a file and using it, whoever may write to the directory may swap its name."""
    folder, victim = tmp_path / "scratch", tmp_path / "victim"
    folder.mkdir()
    victim.write_bytes(b"precious data\n")

    def claim_and_lose(directory, rank):
        owned, removed = claim(directory, rank)
        owned.path.unlink()
        owned.path.symlink_to(victim)
        return owned, removed

    monkeypatch.setattr(disk_module, "claim", claim_and_lose)
    tier = DiskTier([folder])
    block = tier.zeros(1 << 16, "states")
    memory = HostMemory(1 << 16)
    ctypes.memset(memory.address, 7, 1 << 16)
    for ticket in tier.write(block, 0, memory.address, 1 << 16, keep=memory):
        ticket.wait()
    ctypes.memset(memory.address, 0, 1 << 16)
    for ticket in tier.read(block, 0, memory.address, 1 << 16, keep=memory):
        ticket.wait()
    assert bytes(memory.buffer()) == b"\7" * (1 << 16)
    tier.close()
    assert victim.read_bytes() == b"precious data\n"


def test_the_engine_refuses_a_link(tmp_path):
    (tmp_path / "file").write_bytes(b"\0" * 4096)
    (tmp_path / "link").symlink_to(tmp_path / "file")
    with DiskEngine() as engine, pytest.raises(OSError, match="cannot open the file"):
        engine.open(tmp_path / "link", create=False)
