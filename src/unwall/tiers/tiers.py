"""The tiers of one process, together."""

import torch

from unwall.tiers.block import Block, MemoryBlock, Tier
from unwall.tiers.device import DeviceTier
from unwall.tiers.disk import DiskTier
from unwall.tiers.host import HostTier
from unwall.tiers.ledger import Ledger, TierName
from unwall.tiers.links import RING_SLOT_BYTES, Links
from unwall.tiers.meter import LinkMeter
from unwall.tiers.ring import BounceRing
from unwall.tiers.sizes import ALIGNMENT


class Tiers:
    """Device, host and, where there is one, disk, with the links between them.

    ``chunks``: host memory through which the states on disk go while they are updated.
    """

    def __init__(
        self,
        device: DeviceTier,
        host: HostTier,
        disk: DiskTier | None = None,
        *,
        ring_slot_bytes: int = RING_SLOT_BYTES,
        chunk_elements: int = 0,
        chunk_bytes: int = ALIGNMENT,
        chunks: int = 2,
    ) -> None:
        self.device = device
        self.host = host
        self.disk = disk
        self.links = Links(device, host, disk, ring_slot_bytes=ring_slot_bytes)
        self.updates = LinkMeter("update", self.links.timeline)
        """Counts the host's own work on states: bytes read and written by updates."""
        self.chunk_elements = chunk_elements
        self.chunks = BounceRing(host, chunks, chunk_bytes)

    def open_disk(self, disk: DiskTier, ring_slot_bytes: int, chunk_elements: int, chunk_bytes: int, chunks: int) -> None:
        """There is a disk from now on. As the constructor's arguments; the memory for the chunks is taken now."""
        ring = BounceRing(self.host, chunks, chunk_bytes)
        ring.fill()
        self.disk, self.chunks, self.chunk_elements = disk, ring, chunk_elements
        self.links.use_disk(disk, ring_slot_bytes)

    def close_disk(self) -> None:
        """Nothing lives on the disk any more: its files and its buffers on the host go."""
        self.chunks.close()
        self.links.use_disk(None, ALIGNMENT)
        disk, self.disk = self.disk, None
        if disk is not None:
            disk.close()

    @property
    def ledgers(self) -> dict[TierName, Ledger]:
        found: dict[TierName, Ledger] = {"device": self.device.ledger, "host": self.host.ledger}
        return found if self.disk is None else {**found, "disk": self.disk.ledger}

    def memory(self, tier: TierName, numel: int, dtype: torch.dtype, label: str, pinned: bool = False) -> MemoryBlock:
        """Zeroed memory for ``numel`` elements on device or host."""
        if tier == "host":
            return self.host.allocate(numel * dtype.itemsize, label, pinned=pinned)
        block = self.device.allocate(numel * dtype.itemsize, label)
        block.data.zero_()
        return block

    def zeros(self, tier: TierName, numel: int, dtype: torch.dtype, label: str, pinned: bool = False) -> Block:
        """A zeroed block of ``numel`` elements on any tier."""
        if tier != "disk":
            return self.memory(tier, numel, dtype, label, pinned)
        if self.disk is None:
            raise RuntimeError(f"{label} belongs on disk, but no directory was given: Plan(disk=...)")
        return self.disk.zeros(numel * dtype.itemsize, label)

    def free(self, block: Block) -> None:
        owners: dict[TierName, Tier | None] = {"host": self.host, "device": self.device, "disk": self.disk}
        owner = owners[block.tier]
        assert owner is not None
        owner.free(block)
