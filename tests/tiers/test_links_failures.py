"""What goes wrong on the way: faults of the disk, memory that is freed under a copy, work left at the end."""

import errno
import os

import pytest
from tier_tools import MIB, SLOT, Tiers, pattern

from unwall.tiers.block import FreedError
from unwall.tiers.host import HostTier
from unwall.tiers.ledger import BudgetError
from unwall.tiers.links import Links

NBYTES = 9 * SLOT + 3
WAYS = [("disk", "host", "read"), ("host", "disk", "write"), ("disk", "device", "read"), ("device", "disk", "write")]


def is_mapped(address: int) -> bool:
    with open("/proc/self/maps") as maps:
        for line in maps:
            low, high = (int(end, 16) for end in line.split()[0].split("-"))
            if low <= address < high:
                return True
    return False


@pytest.mark.parametrize("skip", [0, 9, 18])
@pytest.mark.parametrize(("source", "target", "op"), [*WAYS, ("disk", "disk", "read"), ("disk", "disk", "write")])
def test_a_fault_is_on_the_ticket_and_the_next_copy_works(tiers: Tiers, source, target, op, skip):
    origin, goal = tiers.filled(source, pattern(NBYTES)), tiers.allocate(target, NBYTES)
    tiers.engine.inject_fault(op, skip, 1, errno.EIO)
    ticket = tiers.links.copy(origin, goal)
    for _ in range(2):
        with pytest.raises(OSError, match=r"Input/output error.*offset \d+, length \d+") as caught:
            ticket.wait()
        assert caught.value.errno == errno.EIO
        assert caught.value.filename == str(tiers.disk.paths[0])
    assert ticket.done()
    assert tiers.links.slots_in_use == 0, "all slots are back"
    tiers.links.copy(origin, goal).wait()
    assert tiers.content(goal).equal(pattern(NBYTES))


@pytest.mark.parametrize("target", ["host", "device"])
def test_a_file_truncated_under_the_engine(tiers: Tiers, target):
    origin, goal = tiers.filled("disk", pattern(NBYTES)), tiers.allocate(target, NBYTES)
    os.truncate(tiers.disk.paths[0], SLOT)
    with pytest.raises(OSError, match="the file ends at byte 65536") as caught:
        tiers.links.copy(origin, goal).wait()
    assert caught.value.filename == str(tiers.disk.paths[0])
    assert tiers.links.slots_in_use == 0


def test_memory_freed_under_a_copy_lives_until_the_copy_is_through(tiers: Tiers):
    on_disk, on_host = tiers.filled("disk", pattern(MIB)), tiers.host.allocate(MIB)
    tiers.hold_reads()
    address, ticket = on_host.address, tiers.links.copy(on_disk, on_host)
    tiers.host.free(on_host)
    assert is_mapped(address)
    assert not ticket.done()
    tiers.let_reads_go()
    ticket.wait()


def test_a_dropped_ticket_does_not_leave_its_memory_to_the_disk(tiers: Tiers):
    on_disk, on_host = tiers.filled("disk", pattern(MIB)), tiers.host.allocate(MIB)
    tiers.hold_reads()
    tiers.let_reads_go(after_seconds=0.05)
    tiers.links.copy(on_disk, on_host)
    assert on_host.data.equal(pattern(MIB)), "the finaliser waited"


def test_a_block_freed_under_a_copy_in_chunks_fails_that_copy(tiers: Tiers):
    on_disk, on_device = tiers.filled("disk", pattern(NBYTES)), tiers.device.allocate(NBYTES)
    tiers.hold_reads()
    ticket = tiers.links.copy(on_disk, on_device)
    tiers.device.free(on_device)
    tiers.let_reads_go()
    with pytest.raises(FreedError, match="device block"):
        ticket.wait()
    assert tiers.links.slots_in_use == 0


def test_no_host_memory_for_the_ring(tiers: Tiers):
    poor = HostTier(budget_bytes=20 << 20)  # two slots of four
    with Links(tiers.device, poor, tiers.disk) as links:
        on_disk, on_device = tiers.filled("disk", pattern(NBYTES)), tiers.device.allocate(NBYTES)
        with pytest.raises(BudgetError, match=r"host tier: bounce ring needs 8\.0 MiB"):
            links.copy(on_disk, on_device)
    assert poor.ledger.live_bytes == 0


def test_closing_finishes_what_is_in_flight_and_frees_the_ring(tiers: Tiers):
    on_disk, on_device = tiers.filled("disk", pattern(NBYTES)), tiers.device.allocate(NBYTES)
    tiers.hold_reads()
    tickets = [tiers.links.copy(on_disk, on_device) for _ in range(2)]
    tiers.let_reads_go(after_seconds=0.05)
    tiers.links.close()
    for ticket in tickets:
        assert ticket.done()
        ticket.wait()
    assert tiers.host.ledger.live_bytes == 0
    with pytest.raises(RuntimeError, match="after shutdown"):
        tiers.links.copy(on_disk, on_device)
