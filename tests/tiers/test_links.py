"""Copies between any two tiers."""

import itertools
import threading
import time

import pytest
import torch
from tier_tools import KIB, MIB, PAGE, SLOT, SLOTS, Tiers, pattern

from unwall.tiers.block import FreedError, Region
from unwall.tiers.disk import DiskTier
from unwall.tiers.links import Links

TIERS = ("device", "host", "disk")
PAIRS = list(itertools.product(TIERS, TIERS))
SIZES = (1, PAGE - 1, PAGE, PAGE + 1, SLOT, (SLOTS + 2) * SLOT + 5)


@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_every_way_and_odd_sizes(tiers: Tiers, source, target):
    for seed, nbytes in enumerate(SIZES):
        data = pattern(nbytes, seed)
        origin, goal = tiers.filled(source, data), tiers.allocate(target, nbytes)
        for meter in tiers.links.meters.values():
            meter.reset()
        tiers.links.copy(origin, goal, "w").wait()
        moved = {ends: meter.read().moved_bytes for ends, meter in tiers.links.meters.items() if meter.read().copies}
        through_host = "disk" in (source, target) and "host" not in (source, target)
        hops = [(source, "host"), ("host", target)] if through_host else [(source, target)]
        assert moved == dict.fromkeys(hops, nbytes)
        assert tiers.content(goal).equal(data)
        assert tiers.content(origin).equal(data)
    assert tiers.links.slots_in_use == 0


def test_busy_time_of_a_link(tiers: Tiers):
    """As long as something is under way, counted once; and, while the time line is on, each piece with its name."""
    meter = tiers.links.meters["disk", "host"]
    on_disk = [tiers.filled("disk", pattern(64 * KIB, seed)) for seed in range(4)]
    on_host = [tiers.allocate("host", 64 * KIB) for _ in on_disk]
    tiers.disk.engine.throttle("read", 1 << 20)
    meter.reset()
    tiers.links.timeline.spans = []
    start = time.monotonic()
    for ticket in [tiers.links.copy(a, b, "layer.0") for a, b in zip(on_disk, on_host, strict=True)]:
        ticket.wait()
    seconds = time.monotonic() - start
    tiers.disk.engine.throttle("read", 0)
    assert 0.1 < meter.read().busy_seconds <= seconds  # a quarter of a second, at that speed
    spans = [span for span in tiers.links.timeline.spans if span.lane == "disk>host"]
    assert [span.label for span in spans] == ["layer.0"] * 4
    assert all(start <= span.start < span.end <= start + seconds for span in spans)


@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_regions(tiers: Tiers, source, target):
    """Exactly the bytes of the region arrive; those around it stay."""
    one, two = pattern(6 * SLOT, 1), pattern(5 * SLOT + 77, 2)
    origin, goal = tiers.filled(source, one), tiers.filled(target, two)
    nbytes = 3 * SLOT + 2 * PAGE
    tiers.links.copy(Region(origin, PAGE, nbytes), Region(goal, SLOT, nbytes)).wait()
    two[SLOT : SLOT + nbytes] = one[PAGE : PAGE + nbytes]
    assert tiers.content(goal).equal(two)


def test_an_odd_tail_of_a_larger_block(tiers: Tiers):
    data = pattern(2 * PAGE + 10)
    on_disk, on_host = tiers.filled("disk", data), tiers.allocate("host", PAGE + 10)
    tiers.links.copy(Region(on_disk, PAGE, PAGE + 10), on_host).wait()
    assert on_host.data.equal(data[PAGE:])


def test_the_device_end_needs_no_alignment(tiers: Tiers):
    data = pattern(3 * SLOT)
    on_disk, on_device = tiers.filled("disk", data), tiers.filled("device", pattern(4 * SLOT, 1))
    expected = tiers.content(on_device)
    tiers.links.copy(Region(on_disk, 0, 2 * SLOT), Region(on_device, 13, 2 * SLOT)).wait()
    expected[13 : 13 + 2 * SLOT] = data[: 2 * SLOT]
    assert tiers.content(on_device).equal(expected)


def test_the_device_end_is_ordered_after_work_queued_before(tiers: Tiers):
    """The copy sees what the caller's stream wrote before, and later writes there do not see a half-read block."""
    nbytes = 8 * MIB
    source, out = tiers.device.allocate(nbytes), tiers.host.allocate(nbytes, pinned=True)
    floats = source.view(torch.float32)
    for number in range(20):
        floats.fill_(number)
    tiers.links.copy(source, out).wait()
    assert bool((out.view(torch.float32) == 19).all())


def test_several_at_once_from_threads_and_the_ring_keeps_its_size(tiers: Tiers):
    data = [pattern(7 * SLOT + 11, seed) for seed in range(8)]
    sources = [tiers.filled(tier, data[seed]) for seed, tier in enumerate(("device", "disk", "disk", "device") * 2)]
    targets = [tiers.allocate(tier, 7 * SLOT + 11) for tier in ("disk", "device", "disk", "disk") * 2]
    tiers.host.ledger.reset_peak()
    start, failures = threading.Barrier(8), []

    def work(at: int) -> None:
        start.wait()
        try:
            for _ in range(5):
                tiers.links.copy(sources[at], targets[at]).wait()
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(at,)) for at in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert tiers.host.ledger.peak_bytes == 3 * SLOTS * SLOT, "what three directions cost in host memory"
    assert tiers.links.slots_in_use == 0
    for at in range(8):
        assert tiers.content(targets[at]).equal(data[at])


def test_waiting_for_one_does_not_wait_for_the_others(tiers: Tiers):
    on_disk, on_host = tiers.filled("disk", pattern(MIB)), tiers.allocate("host", MIB)
    on_device = tiers.allocate("device", MIB)
    tiers.hold_reads()
    slow = [tiers.links.copy(on_disk, on_host), tiers.links.copy(on_disk, on_device)]
    quick = [
        tiers.links.copy(tiers.filled("host", pattern(MIB)), tiers.allocate("disk", MIB)),
        tiers.links.copy(tiers.filled("host", pattern(MIB)), tiers.allocate("device", MIB)),
        tiers.links.copy(tiers.filled("device", pattern(MIB)), tiers.allocate("disk", MIB)),
    ]
    for ticket in quick:
        ticket.wait()
    assert not any(ticket.done() for ticket in slow)
    tiers.let_reads_go()
    for ticket in slow:
        ticket.wait()
    assert tiers.content(on_device).equal(on_host.data)


def test_stalls_are_counted_where_someone_waited(tiers: Tiers):
    meter = tiers.links.meters["disk", "host"]
    on_disk, on_host = tiers.filled("disk", pattern(128 * KIB)), tiers.allocate("host", 128 * KIB)
    for seconds in (0.1, 1.0, 5.0, 20.0):  # until this thread begins to wait before the reads go
        meter.reset()
        tiers.hold_reads()
        ticket = tiers.links.copy(on_disk, on_host, "layer.3")
        tiers.let_reads_go(after_seconds=seconds)
        ticket.wait()
        stats = meter.read()
        if stats.stall_seconds > 0.05:
            break
    assert stats.stalls.keys() == {"layer.3"}
    assert stats.stall_seconds == stats.stalls["layer.3"] > 0.05
    ticket = tiers.links.copy(on_disk, on_host, "layer.4")
    while not ticket.done():
        time.sleep(0.001)
    ticket.wait()
    stats = meter.read()
    assert "layer.4" not in stats.stalls, "it was there before anyone asked"
    assert (stats.moved_bytes, stats.copies) == (256 * KIB, 2)
    meter.reset()
    assert meter.read().moved_bytes == meter.read().stall_seconds == 0


def test_refused_copies_count_nothing(tiers: Tiers, tmp_path):
    host, other_host = tiers.allocate("host", 3 * PAGE), tiers.allocate("host", 3 * PAGE)
    disk, device = tiers.allocate("disk", 3 * PAGE), tiers.allocate("device", 3 * PAGE)
    copy = tiers.links.copy
    with pytest.raises(ValueError, match=r"copy of 4096 bytes from HostBlock.* into 12288 bytes of DiskBlock"):
        copy(Region(host, 0, PAGE), disk)
    for block in (host, device, disk):
        with pytest.raises(ValueError, match="the ends of the copy overlap"):
            copy(Region(block, 0, 2 * PAGE), Region(block, PAGE, 2 * PAGE))
    with pytest.raises(ValueError, match=r"5000 bytes in the middle of HostBlock.*use a multiple of 4096"):
        copy(Region(host, 0, 5000), Region(tiers.allocate("disk", 5000), 0, 5000))
    with pytest.raises(ValueError, match=r"5000 bytes in the middle of DiskBlock.*use a multiple of 4096"):
        copy(Region(device, 0, 5000), Region(disk, 0, 5000))
    with pytest.raises(ValueError, match=r"byte 512 of HostBlock.*use a multiple of 4096"):
        copy(Region(host, 512, PAGE), Region(disk, 0, PAGE))
    tiers.device.deflate(device)
    with pytest.raises(RuntimeError, match="is deflated: inflate it before a copy"):
        copy(host, device)
    with Links(tiers.device, tiers.host) as diskless, pytest.raises(RuntimeError, match="has no disk tier"):
        diskless.copy(disk, host)
    other = DiskTier([tmp_path], engine=tiers.engine)
    with pytest.raises(ValueError, match="belongs to another disk tier"):
        copy(other.allocate(3 * PAGE), host)
    other.close()
    tiers.host.free(host)
    with pytest.raises(FreedError, match="host block '' of 12288 bytes was already freed"):
        copy(host, other_host)
    assert all(meter.read().copies == 0 for meter in tiers.links.meters.values())


@pytest.mark.parametrize(("offset", "nbytes"), [(0, 0), (0, -1), (-PAGE, PAGE), (PAGE, PAGE + 1), (0, 2 * PAGE + 1)])
def test_a_region_is_a_part_of_its_block(tiers: Tiers, offset, nbytes):
    for tier in TIERS:
        with pytest.raises(ValueError, match=f"bytes {offset} to {offset + nbytes} are not a part of .*{tier}, 8192 bytes"):
            Region(tiers.allocate(tier, 2 * PAGE), offset, nbytes)


def test_a_disk_region_starts_at_a_sector(tiers: Tiers):
    with pytest.raises(ValueError, match="starts at a multiple of 4096 bytes, got offset 512"):
        Region(tiers.allocate("disk", 2 * PAGE), 512, PAGE)
