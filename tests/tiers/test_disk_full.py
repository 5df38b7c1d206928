"""A drive that is full, on a real small file system."""

import errno

import pytest
from tier_tools import MIB, Tiers, pattern, tmpfs

from unwall.native.disk import DiskEngine
from unwall.tiers.disk import DiskTier

pytestmark = pytest.mark.filterwarnings("ignore:the file system of .* refuses O_DIRECT")


def test_a_full_drive_is_named_and_nothing_is_lost(tmp_path):
    with tmpfs(tmp_path / "small", 32 * MIB) as directory:
        tiers = Tiers(directory, "cpu")
        kept = tiers.filled("disk", pattern(6 * MIB))
        filler = directory / "filler"
        filler.write_bytes(bytes(16 * MIB))
        live, held = tiers.disk.ledger.live_bytes, tiers.disk.paths[0].stat().st_size
        with pytest.raises(OSError, match=rf"weights needs .* more on disk in {directory}") as caught:
            tiers.disk.allocate(12 * MIB, "weights")
        assert caught.value.errno == errno.ENOSPC
        assert caught.value.filename == str(tiers.disk.paths[0])
        assert tiers.disk.ledger.live_bytes == live
        assert tiers.disk.paths[0].stat().st_size == held, "a failed growth takes nothing"
        assert tiers.content(kept).equal(pattern(6 * MIB))
        filler.unlink()
        block = tiers.filled("disk", pattern(12 * MIB, 1))
        assert tiers.content(block).equal(pattern(12 * MIB, 1))
        assert tiers.content(kept).equal(pattern(6 * MIB))
        tiers.close()


def test_the_last_bytes_are_used_though_a_whole_step_does_not_fit(tmp_path):
    with tmpfs(tmp_path / "small", 10 * MIB) as directory, DiskEngine(threads=1) as engine:
        tier = DiskTier([directory], engine=engine, growth_bytes=64 * MIB)
        _held = tier.allocate(8 * MIB)
        assert tier.paths[0].stat().st_size == 8 * MIB
        with pytest.raises(OSError, match="cannot reserve"):
            tier.allocate(4 * MIB)
        tier.allocate(MIB)
        tier.close()


def test_a_drive_without_room_for_a_file(tmp_path):
    with tmpfs(tmp_path / "small", 10 * MIB) as directory, DiskEngine(threads=1) as engine:
        (directory / "filler").write_bytes(bytes(10 * MIB))
        tier = DiskTier([directory], engine=engine)
        with pytest.raises(OSError, match=f"more on disk in {directory}"):
            tier.allocate(1)
        tier.close()


class Spare:
    """Holds a block that it can do without."""

    def __init__(self, tier, nbytes):
        self.tier, self.block = tier, tier.allocate(nbytes)

    def give_back(self):
        if self.block is not None:
            self.tier.free(self.block)
            self.block = None


@pytest.mark.parametrize("asked", [False, True])
def test_a_full_drive_gets_back_what_others_can_do_without(tmp_path, asked):
    with tmpfs(tmp_path / "small", 10 * MIB) as directory, DiskEngine(threads=1) as engine:
        tier = DiskTier([directory], engine=engine, growth_bytes=MIB)
        spare = Spare(tier, 6 * MIB)
        if not asked:
            with pytest.raises(OSError, match="cannot reserve"):
                tier.allocate(6 * MIB)
            tier.close()
            return
        tier.ledger.ask_before_refusing(spare.give_back)
        held = tier.allocate(6 * MIB)
        assert held.nbytes == tier.ledger.live_bytes == 6 * MIB
        with pytest.raises(OSError, match="cannot reserve"):
            tier.allocate(6 * MIB)  # there is nothing left to give back
        assert tier.ledger.live_bytes == 6 * MIB
        tier.close()
