"""The tiers of one process, together."""

import torch

from unwall.tiers.block import Block, MemoryBlock
from unwall.tiers.device import DeviceTier
from unwall.tiers.host import HostTier
from unwall.tiers.ledger import TierName
from unwall.tiers.links import Links


class Tiers:
    """Device and host, and the links between them. (The disk tier joins them when the engine uses it.)"""

    def __init__(self, device: DeviceTier, host: HostTier) -> None:
        self.device = device
        self.host = host
        self.links = Links(device, host)

    def allocate(self, tier: TierName, nbytes: int, label: str, pinned: bool = False) -> MemoryBlock:
        """Memory on a tier. Host memory is zeroed, device memory is not."""
        if tier == "host":
            return self.host.allocate(nbytes, label, pinned=pinned)
        if tier == "device":
            return self.device.allocate(nbytes, label)
        raise ValueError(f"no memory on tier {tier!r}")

    def free(self, block: Block) -> None:
        (self.host if block.tier == "host" else self.device).free(block)

    def zeros(self, tier: TierName, numel: int, dtype: torch.dtype, label: str, pinned: bool = False) -> MemoryBlock:
        """A zeroed block of ``numel`` elements."""
        block = self.allocate(tier, numel * dtype.itemsize, label, pinned)
        if tier == "device":
            block.data.zero_()
        return block
