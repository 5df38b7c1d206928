"""Blocks on disk as they were, while they are written to."""

import errno
import os
import shutil

import pytest
import torch
from reflinks import KINDS, sharing
from tier_tools import KIB, MIB, PAGE, Tiers, pattern

from unwall.native.disk import DiskEngine
from unwall.native.memory import HostMemory
from unwall.tiers import clone as clones
from unwall.tiers import disk
from unwall.tiers.clone import striped
from unwall.tiers.disk import STRIPE_BYTES, DiskTier
from unwall.tiers.extents import Extent


def read(source, block, offset=0, nbytes=None):
    nbytes = block.nbytes - offset if nbytes is None else nbytes
    memory = HostMemory(-(-nbytes // PAGE) * PAGE)
    for ticket in source.read(block, offset, memory.address, nbytes, keep=memory):
        ticket.wait()
    return torch.frombuffer(memory.buffer(), dtype=torch.uint8)[:nbytes].clone()


def write(tier, block, data):
    memory = HostMemory(-(-data.numel() // PAGE) * PAGE)
    torch.frombuffer(memory.buffer(), dtype=torch.uint8)[: data.numel()].copy_(data)
    for ticket in tier.write(block, 0, memory.address, data.numel(), keep=memory):
        ticket.wait()


@pytest.fixture(params=KINDS)
def folder(request, tmp_path, monkeypatch):
    with sharing(request.param, tmp_path, monkeypatch) as made:
        yield made


@pytest.fixture
def tier(folder):
    with DiskEngine(threads=2) as engine:
        made = DiskTier([folder], engine=engine, growth_bytes=16 * MIB)
        yield made
        made.close()


def test_a_clone_keeps_what_the_blocks_had(tier):
    sizes = [3 * MIB, 20, 5 * PAGE + 1]
    blocks = [tier.allocate(nbytes) for nbytes in sizes]
    other = tier.allocate(MIB)
    for seed, block in enumerate(blocks):
        write(tier, block, pattern(block.nbytes, seed))
    live = tier.ledger.live_bytes
    clone = tier.clone(blocks)
    assert tier.ledger.live_bytes == live + 3 * MIB + 7 * PAGE
    heads = [block.head(block.nbytes) for block in blocks]
    for block in (*blocks, other):
        write(tier, block, pattern(block.nbytes, 9))
    tier.free(blocks[0])
    again = tier.allocate(3 * MIB)
    write(tier, again, pattern(3 * MIB, 10))
    for seed, head in enumerate(heads):
        assert read(clone, head).equal(pattern(head.nbytes, seed))
    assert read(clone, heads[0], MIB, 100).equal(pattern(3 * MIB, 0)[MIB : MIB + 100])
    clone.close()
    assert tier.ledger.live_bytes == live  # one of the blocks went, one of its size came
    assert [path.name for path in tier.paths[0].parent.iterdir() if path.is_file()] == [tier.paths[0].name]
    assert read(tier, again).equal(pattern(3 * MIB, 10))


def test_clones_of_a_striped_file_and_of_blocks_in_several_holes(folder):
    drives = [folder / name for name in ("a", "b", "c")]
    for drive in drives:
        drive.mkdir()
    with DiskEngine(threads=2) as engine:
        tier = DiskTier(drives, engine=engine, growth_bytes=STRIPE_BYTES)
        parts = [tier.allocate(3 * MIB) for _ in range(8)]
        for number in (1, 3, 5):
            tier.free(parts[number])
        scattered = tier.allocate(9 * MIB)
        assert len(scattered.extents) > 1
        data = pattern(9 * MIB, 1)
        write(tier, scattered, data)
        write(tier, parts[2], pattern(3 * MIB, 2))
        clone = tier.clone([scattered, parts[2]])
        write(tier, scattered, pattern(9 * MIB, 3))
        write(tier, parts[2], pattern(3 * MIB, 3))
        assert read(clone, scattered).equal(data)
        assert read(clone, parts[2]).equal(pattern(3 * MIB, 2))
        clone.close()
        tier.close()


def test_a_tier_without_room_for_both_makes_none(folder):
    with DiskEngine(threads=1) as engine:
        tier = DiskTier([folder], 8 * MIB, engine=engine)
        block = tier.allocate(5 * MIB)
        assert tier.clone([block]) is None
        small = tier.allocate(MIB)
        assert tier.clone([small], beside_bytes=MIB + 1) is None
        second = tier.clone([small], beside_bytes=MIB)
        assert second is not None
        second.close()
        assert tier.ledger.live_bytes == 6 * MIB
        tier.close()


def test_what_is_free_inside_of_the_tiers_file_is_no_room_for_a_clone(folder, monkeypatch):
    """What is written to shared extents goes elsewhere on the drive. Without room there, training would fail in a write."""
    with DiskEngine(threads=1) as engine:
        tier = DiskTier([folder], engine=engine)
        block, other = tier.allocate(MIB), tier.allocate(64 * MIB)
        tier.free(other)
        left = shutil.disk_usage(folder)._replace(free=2 * MIB - 1)
        monkeypatch.setattr(disk.shutil, "disk_usage", lambda _: left)
        assert tier.spare_bytes() > 32 * MIB
        assert tier.clone([block]) is None
        tier.close()


def test_a_clone_that_nobody_has_closed_is_counted_no_more(tier):
    block = tier.allocate(MIB)
    clone = tier.clone([block])
    assert tier.ledger.live_bytes == 2 * MIB
    del clone
    assert tier.ledger.live_bytes == MIB


@pytest.mark.parametrize("refusal", [errno.EOPNOTSUPP, errno.ENOSPC])
def test_a_file_system_that_cannot_is_asked_once(tmp_path, monkeypatch, refusal):
    asked = []

    def refused(*arguments):
        asked.append(arguments)
        raise OSError(refusal, os.strerror(refusal))

    monkeypatch.setattr(clones.fcntl, "ioctl", refused)
    tiers = Tiers(tmp_path, "cpu")
    block = tiers.filled("disk", pattern(64 * KIB))
    assert tiers.disk.clone([block]) is None
    assert tiers.disk.clone([block]) is None
    assert len(asked) == (1 if refusal == errno.EOPNOTSUPP else 2)  # a full drive may have room later
    assert tiers.disk.ledger.live_bytes == 64 * KIB
    assert tiers.content(block).equal(pattern(64 * KIB))
    tiers.close()


def test_where_extents_lie_in_striped_files():
    stripe = 4
    assert striped([Extent(1, 30)], 1, stripe) == [[Extent(1, 30)]]
    # 0-3 a, 4-7 b, 8-11 a, 12-15 b, 16-19 a
    assert striped([Extent(2, 16)], 2, stripe) == [[Extent(2, 8)], [Extent(0, 8)]]
    assert striped([Extent(12, 2), Extent(4, 2), Extent(6, 2)], 2, stripe) == [[], [Extent(0, 6)]]


def test_the_number_of_the_call_is_the_kernels():
    write, size = 1, 32
    assert write << 30 | size << 16 | 0x94 << 8 | 13 == clones.FICLONERANGE
