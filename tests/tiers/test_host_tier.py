"""Host memory in exact sizes."""

import pytest
import torch
from pages import mapped, newly_mapped, resident
from tier_tools import MIB, PAGE

from unwall.native.pool import WorkerPool
from unwall.tiers.block import FreedError
from unwall.tiers.host import HostTier
from unwall.tiers.ledger import BudgetError


def test_a_block_takes_what_was_asked_for_and_gives_it_back():
    nbytes = 96 * MIB + 12345  # an allocator that rounds up to a power of two would take 128 MiB
    with WorkerPool(2) as pool:
        tier = HostTier(pool)
        tier.free(tier.allocate(nbytes))  # what the workers take at first use is there
        before = mapped()
        block = tier.allocate(nbytes)
        grown = newly_mapped(before, block.address)
        address, taken = block.address, resident(block.address, nbytes)
        assert tier.ledger.live_bytes == nbytes
        tier.free(block)
        del block
        left = resident(address, nbytes)
    assert taken == -(-nbytes // PAGE) * PAGE
    assert grown < nbytes + 8 * MIB
    assert left < 8 * MIB
    assert tier.ledger.live_bytes == 0


def test_blocks_are_zeroed_aligned_and_exact():
    tier = HostTier()
    for nbytes in (1, PAGE, 3 * MIB + 1):
        block = tier.allocate(nbytes)
        assert block.data.numel() == nbytes
        assert block.address % PAGE == 0
        assert not block.data.any()


def test_a_view_outlives_its_block():
    tier = HostTier()
    block = tier.allocate(MIB)
    view = block.view(torch.int32)
    view.fill_(7)
    tier.free(block)
    assert bool((view == 7).all())


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is an accelerator here")
def test_pinned_means_nothing_without_an_accelerator():
    block = HostTier().allocate(PAGE, pinned=True)
    assert not block.pinned
    block.data.fill_(1)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no accelerator here")
def test_pinned_memory_is_locked_while_a_view_lives():
    tier = HostTier()
    for _ in range(3):  # registering a place that is registered already would fail
        block = tier.allocate(64 * MIB, pinned=True)
        assert block.pinned
        view = block.data
        tier.free(block)
        assert view.is_pinned()
        del view, block


def test_the_budget_and_a_budget_of_zero():
    tier = HostTier(budget_bytes=PAGE)
    block = tier.allocate(PAGE)
    with pytest.raises(BudgetError, match=r"host tier: m needs 1 B .*4\.0 KiB of its budget of 4\.0 KiB"):
        tier.allocate(1, "m")
    tier.free(block)
    tier.allocate(PAGE)
    with pytest.raises(BudgetError, match="host_bytes in the Plan"):
        HostTier(budget_bytes=0).allocate(1)


def test_a_double_free_and_a_use_after_free():
    tier = HostTier()
    block = tier.allocate(10, "w")
    tier.free(block)
    with pytest.raises(FreedError, match="host block 'w' of 10 bytes was already freed"):
        tier.free(block)
    with pytest.raises(FreedError, match="already freed"):
        _ = block.address
    assert tier.ledger.live_bytes == 0


def test_what_the_system_refuses_is_not_counted():
    tier = HostTier()
    with pytest.raises(MemoryError, match="host memory"):
        tier.allocate(1 << 55)
    assert tier.ledger.live_bytes == 0


@pytest.mark.parametrize("nbytes", [0, -1])
def test_an_empty_block_is_refused(nbytes):
    with pytest.raises(ValueError, match=f"host tier: a block has at least one byte, got {nbytes}"):
        HostTier().allocate(nbytes)
