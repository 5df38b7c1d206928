"""The slots between disk and device."""

import pytest
from tier_tools import PAGE

from unwall.tiers.host import HostTier
from unwall.tiers.ledger import BudgetError
from unwall.tiers.ring import BounceRing


def test_slots_come_at_first_use_and_never_more():
    host = HostTier()
    ring = BounceRing(host, slots=2, slot_bytes=PAGE)
    assert host.ledger.live_bytes == 0
    one = ring.acquire()
    assert host.ledger.live_bytes == PAGE
    two = ring.acquire()
    assert ring.full()
    with pytest.raises(RuntimeError, match="all 2 slots of the bounce ring are in use"):
        ring.acquire()
    ring.release(one)
    assert ring.acquire() is one
    assert host.ledger.live_bytes == 2 * PAGE
    ring.release(one)
    ring.release(two)
    assert ring.in_use == 0
    ring.close()
    assert host.ledger.live_bytes == 0


def test_a_slot_is_released_once():
    ring = BounceRing(HostTier(), slots=2, slot_bytes=PAGE)
    slot = ring.acquire()
    ring.release(slot)
    with pytest.raises(ValueError, match="is not a slot in use"):
        ring.release(slot)
    assert ring.acquire() is not ring.acquire(), "it is there once"


def test_slots_of_another_size():
    """Those in use go when they come back; the account is right throughout."""
    host = HostTier(None, 8 * PAGE)
    ring = BounceRing(host, slots=3, slot_bytes=PAGE)
    ring.fill()
    kept = ring.acquire()
    ring.resize(2 * PAGE)
    assert host.ledger.live_bytes == PAGE + 2 * 2 * PAGE
    assert {ring.acquire().nbytes, ring.acquire().nbytes} == {2 * PAGE}
    assert ring.full()
    ring.release(kept)
    assert ring.acquire().nbytes == 2 * PAGE
    assert host.ledger.live_bytes == 3 * 2 * PAGE


def test_slots_that_cannot_grow_stay_as_they_were():
    host = HostTier(None, 4 * PAGE)
    ring = BounceRing(host, slots=3, slot_bytes=PAGE)
    ring.fill()
    with pytest.raises(BudgetError):
        ring.resize(2 * PAGE)
    assert [ring.acquire().nbytes for _ in range(3)] == [PAGE] * 3


@pytest.mark.parametrize(("slots", "slot_bytes"), [(1, PAGE), (2, 0), (2, PAGE + 1), (2, -PAGE)])
def test_bad_shapes(slots, slot_bytes):
    with pytest.raises(ValueError, match=f"2 slots or more of a multiple of 4096 bytes, got {slots} x {slot_bytes}"):
        BounceRing(HostTier(), slots, slot_bytes)
