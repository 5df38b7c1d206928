"""Gathers of a group's parameters as blocks of small integers (``Plan.gather_dtype``).

[Note: packed gathers]
Every rank packs its shard, gets all packed shards, and unpacks all of them into the flat buffer, its own among them: so the
ranks compute with the same bits. What is unpacked is a copy to compute with and nothing else. Shards and masters stay as they
are; ``state_dict``, checkpoints, ``full_params`` and everything else outside a pass reads those. Where the flat buffer is the
home of the parameters (stages 1 and 2 on the device) they are never gathered this way, because that would overwrite them.
"""

from contextlib import AbstractContextManager

import torch

from unwall.shards.collectives import Collective, Ranks
from unwall.shards.compress import Codec
from unwall.shards.layout import Layout
from unwall.tiers.device import DeviceTier


class PackedGather:
    """How one group is gathered. See [Note: packed gathers]."""

    def __init__(self, codec: Codec, device: DeviceTier, layout: Layout, ranks: Ranks, label: str) -> None:
        self._codec = codec
        self._device = device
        self._layout = layout
        self._ranks = ranks
        self._label = label
        self.part_bytes = codec.packed_bytes(layout.shard_numel)
        """What one rank sends."""

    @property
    def nbytes(self) -> int:
        """Device memory of one on its way."""
        return self.part_bytes * self._ranks.size

    def begin(self, flat: torch.Tensor | None, source: torch.Tensor, behind: AbstractContextManager[None]) -> Collective:
        """Starts to gather everybody's ``source``. After ``wait`` it is in ``flat``, or nowhere: another rank needs it.

        ``behind``: what uses the device is queued inside. Its memory is not taken there: where the card has none, groups are
        dropped for it, and what waits for their gathers is the stream that goes on to use their memory."""
        block = self._device.allocate(self.nbytes, self._label)
        try:
            packed = block.view(torch.uint8)
            part = packed[self._ranks.rank * self.part_bytes :][: self.part_bytes]

            def arrived() -> None:
                try:
                    if flat is not None:
                        with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(flat):  # type: ignore[attr-defined]
                            self._codec.unpack(flat, packed, self._ranks.size)
                finally:
                    self._device.free(block)

            with behind:
                self._codec.pack(part, source)
                return self._ranks.all_gather(packed, part, arrived)
        except BaseException:
            self._device.free(block)
            raise

    def shown(self, source: torch.Tensor) -> torch.Tensor:
        """This rank's shard as all ranks compute with it."""
        packed = torch.empty(self.part_bytes, dtype=torch.uint8, device=source.device)
        values = torch.empty_like(source)
        self._codec.pack(packed, source)
        self._codec.unpack(values, packed)
        return values
