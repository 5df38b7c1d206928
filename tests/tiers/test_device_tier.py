"""Device memory with an account, taken away and given back under the same storage."""

import pytest
import torch

from unwall.tiers.block import FreedError
from unwall.tiers.device import DeviceTier, default_device
from unwall.tiers.host import HostTier
from unwall.tiers.ledger import BudgetError


@pytest.fixture
def tier(device) -> DeviceTier:
    return DeviceTier(torch.device(device), budget_bytes=1000)


def test_views_and_storage_survive_a_deflation(tier):
    block = tier.allocate(400, "group")
    view = block.view(torch.float32)
    transposed = view.view(10, 10).t()  # what a Linear saves for its backward
    storage = view.untyped_storage()
    tier.deflate(block)
    assert storage.nbytes() == 0
    assert block.deflated
    assert transposed.shape == (10, 10)
    tier.inflate(block)
    assert not block.deflated
    assert block.data.untyped_storage()._cdata == storage._cdata
    block.view(torch.float32).copy_(torch.arange(100))
    assert transposed[3, 7] == 73
    assert view.data_ptr() == block.data.data_ptr()


def test_accounting(tier):
    one, two = tier.allocate(600), tier.allocate(300)
    assert tier.ledger.live_bytes == 900
    tier.deflate(one)
    assert tier.ledger.live_bytes == 300
    three = tier.allocate(500)
    with pytest.raises(BudgetError, match="device tier: a request needs 600 B"):
        tier.inflate(one)
    assert one.deflated
    tier.free(three)
    tier.inflate(one)
    assert (tier.ledger.live_bytes, tier.ledger.peak_bytes) == (900, 900)
    tier.deflate(one)
    tier.free(one)
    tier.free(two)
    assert tier.ledger.live_bytes == 0


def test_the_budget(tier):
    _held = tier.allocate(1000)
    with pytest.raises(BudgetError, match=r"device tier: w needs 1 B .* budget of 1000 B .*device_bytes"):
        tier.allocate(1, "w")


def test_deflating_and_inflating_twice_is_counted_once(tier):
    block = tier.allocate(10, "w")
    block.data.fill_(7)
    tier.inflate(block)
    assert block.data.sum() == 70
    assert tier.ledger.live_bytes == 10
    for _ in range(2):
        tier.deflate(block)
        assert tier.ledger.live_bytes == 0
    tier.inflate(block)
    assert tier.ledger.live_bytes == 10
    tier.free(block)


def test_the_account_follows_the_memory_after_an_interrupt(tier):
    """Something raised between the memory and the account: the next step puts it right."""
    block = tier.allocate(10, "w")
    block.data.untyped_storage().resize_(0)  # as if deflating was interrupted
    tier.inflate(block)
    assert tier.ledger.live_bytes == 10
    tier.deflate(block)
    assert tier.ledger.live_bytes == 0
    tier.free(block)


def test_a_storage_that_cannot_be_resized_is_left_as_it_is():
    tier = DeviceTier(torch.device("cpu"))
    block = tier.allocate(10, "w")
    kept = block.data.numpy()
    with pytest.raises(RuntimeError, match="resizable"):
        tier.deflate(block)
    assert (tier.ledger.live_bytes, len(kept)) == (10, 10)


def test_illegal_steps(tier):
    block = tier.allocate(10, "w")
    tier.free(block)
    for step in (tier.free, tier.deflate, tier.inflate, lambda block: block.data, lambda block: block.view(torch.uint8)):
        with pytest.raises(FreedError, match="device block 'w' of 10 bytes was already freed"):
            step(block)
    assert tier.ledger.live_bytes == 0


@pytest.mark.parametrize("nbytes", [0, -1])
def test_an_empty_block_is_refused(tier, nbytes):
    with pytest.raises(ValueError, match=f"device tier: a block has at least one byte, got {nbytes}"):
        tier.allocate(nbytes)


def test_a_block_of_another_tier_is_refused(tier):
    host = HostTier()
    block = host.allocate(10)
    for wrong in (tier, HostTier()):
        with pytest.raises(ValueError, match=f"was not allocated by this {wrong.name} tier"):
            wrong.free(block)
    host.free(block)


def test_what_the_system_refuses_is_not_counted(device):
    tier = DeviceTier(torch.device(device))
    with pytest.raises(RuntimeError, match="memory"):
        tier.allocate(1 << 55)
    assert tier.ledger.live_bytes == 0


def test_the_default_device_leaves_the_accelerator_alone():
    assert default_device().type == ("cuda" if torch.cuda.is_available() else "cpu")


def test_views(tier):
    block = tier.allocate(22)
    assert block.view(torch.float32).numel() == 5
    assert block.view(torch.int16, 3, 16).storage_offset() == 8
    for numel, offset in ((4, 16), (-1, 0)):
        with pytest.raises(ValueError, match=f"{numel} elements of torch.int16 from byte {offset} do not fit"):
            block.view(torch.int16, numel, offset)
    for offset in (3, -2, 24):
        with pytest.raises(ValueError, match=f"byte {offset} of .* is no place for a torch.int16: use a multiple of 2"):
            block.view(torch.int16, 1, offset)
