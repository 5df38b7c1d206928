"""A second copy of a group's parameters inside the node (``Plan(replica="node")``).

[Note: replica]
The first gather of a group after its parameters changed goes over all ranks. When it has arrived, each rank of a node keeps its
1/R of what came, where R is the number of ranks on the node: the very bits that all ranks compute with, unpacked where they
travelled packed. Whatever needs the group again, backward or another pass, gathers these parts inside the node.

A replica counts until the parameters change: ``outdated`` says so (an update, a fault), and so does the group's ``generation``
(whatever writes to parameters otherwise). Which of both ways a gather goes is part of what the ranks agree on (``NEAR`` in
schedule/script.py), so no rank can take another one than the others. Where a rank only serves a gather inside the node, it
gives what it has: the rank that asked knows that this is what it wants.

Nothing but passes reads a replica: ``state_dict``, checkpoints and ``full_params`` read masters.
"""

import torch

from unwall.shards.collectives import Collective, Ranks
from unwall.shards.flat import FlatBuffer
from unwall.shards.layout import Layout
from unwall.tiers.block import MemoryBlock, Region
from unwall.tiers.ledger import TierName
from unwall.tiers.ticket import Ticket, order_after
from unwall.tiers.tiers import Tiers


class Replica:
    """This rank's part of one group's second copy, on ``tier`` (device or host). See [Note: replica]."""

    def __init__(self, tiers: Tiers, tier: TierName, layout: Layout, inside: Ranks, name: str) -> None:
        self._tiers = tiers
        self._device = tiers.device.device
        self._layout = layout
        self._inside = inside
        self._name = name
        self._numel = layout.padded_numel // inside.size
        self._generation: int | None = None
        """Of the group, when it was gathered last. None: there is nothing here."""
        self._wanted = False
        """A gather is under way that fills it."""
        self._filling: Ticket | None = None
        self.block: MemoryBlock = tiers.memory(tier, self._numel, layout.dtype, f"second copy of {name}", pinned=True)

    def free(self) -> None:
        """The group has another one, or none, from now on."""
        if self._filling is not None:
            self._filling.wait()
        self._tiers.free(self.block)

    # -- what it holds ------------------------------------------------------------------------------------------------

    def counts(self, generation: int) -> bool:
        """Whether it holds, or is about to hold, what the parameters are now."""
        return self._generation == generation

    def outdated(self) -> None:
        self._generation, self._wanted = None, False

    def await_gather(self, generation: int) -> None:
        """A gather over all ranks begins: ``fill`` takes what it brings."""
        if self._generation != generation:
            self._generation, self._wanted = generation, True

    def fill(self, flat: FlatBuffer) -> None:
        """What was gathered has arrived, or was here already."""
        if not self._wanted:
            return
        self._order()
        self._wanted = False
        if self.block.tier == "device":
            with torch.no_grad():
                self.block.view(self._layout.dtype).copy_(self._place(flat.tensor))
            return
        self._filling = self._tiers.links.copy(self._part(flat), Region.whole(self.block), self._name)

    def let_go(self) -> None:
        """The flat buffer is about to go. On an accelerator its memory is not used again before it was copied."""
        if self._filling is not None and self._device.type == "cpu":
            self._order()

    def _order(self) -> None:
        """Whatever comes next finds what was being copied."""
        if self._filling is not None:
            order_after(self._filling, self._device)
            self._filling = None

    # -- what it gives ------------------------------------------------------------------------------------------------

    def begin_bring(self, flat: FlatBuffer) -> Ticket | None:
        """From the host: starts to bring this rank's part to its place in the flat buffer. None where it is on the device."""
        self._order()
        if self.block.tier == "device":
            return None
        return self._tiers.links.copy(Region.whole(self.block), self._part(flat), self._name)

    def gather(self, flat: FlatBuffer) -> Collective:
        """Starts to gather the parts of the node. What ``begin_bring`` brings is there."""
        source = self.block.view(self._layout.dtype) if self.block.tier == "device" else self._place(flat.tensor)
        return self._inside.all_gather(flat.tensor, source)

    def serve(self) -> None:
        """Gathers them for another rank, to nowhere."""
        self._order()
        with self._tiers.device.noting(self._layout.flat_bytes, self._name):
            whole = torch.empty(self._layout.padded_numel, dtype=self._layout.dtype, device=self._device)
            place = self._place(whole)
            place.copy_(self.block.view(self._layout.dtype))
            self._inside.all_gather(whole, place).wait()

    @property
    def travels(self) -> tuple[int, int]:
        """Elements of a rank's part, and of all of them."""
        return self._numel, self._layout.padded_numel

    def feign(self, whole: torch.Tensor, part: torch.Tensor) -> Collective:
        """The collective of a gather, with other values (shards/feign.py)."""
        return self._inside.all_gather(whole, part)

    @property
    def incoming_bytes(self) -> int:
        """What a gather inside the node brings from other ranks."""
        return self._inside.from_others(self._layout.flat_bytes)

    def _place(self, flat: torch.Tensor) -> torch.Tensor:
        return flat.narrow(0, self._inside.rank * self._numel, self._numel)

    def _part(self, flat: FlatBuffer) -> Region:
        return Region(flat.block, self._inside.rank * self.block.nbytes, self.block.nbytes)
