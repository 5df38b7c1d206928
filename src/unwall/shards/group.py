"""The unit that moves: parameters laid end to end in one flat buffer, and this rank's part of their states.

[Note: residence]
ABSENT     parameters are placeholders; the flat buffer has no memory (or, when params are not cut, stale content).
ARRIVING   the flat buffer has memory and is being filled; parameters are still placeholders.
RESIDENT   the flat buffer is filled and every parameter is a view of it.

[Note: placeholders]
The parameter of an absent group is one NaN expanded to its shape: shape, dtype, device and numel stay true, a read gives NaN
(loud, never garbage) and a write in place raises. The nn.Parameter object itself is the user's and never changes.
"""

import enum
from collections.abc import Sequence
from contextlib import AbstractContextManager

import torch
from torch import nn

from unwall.shards.collectives import Ranks, Work
from unwall.shards.layout import Layout, Segment
from unwall.tiers.block import MemoryBlock
from unwall.tiers.device import DeviceTier


class Residence(enum.Enum):
    """See [Note: residence]."""

    ABSENT = "absent"
    ARRIVING = "arriving"
    RESIDENT = "resident"


class Group:
    """An ordered list of parameters, their flat buffer, and the states this rank owns of them.

    ``own`` is the run of flat elements whose gradient, master and optimizer state this rank keeps: its 1/N, or everything at
    stage 0. ``shard`` is this rank's 1/N of the parameters in the compute dtype: a part of the flat buffer where that is kept
    whole, memory of its own where parameters are cut.
    """

    def __init__(
        self,
        index: int,
        name: str,
        layout: Layout,
        params: Sequence[nn.Parameter],
        dtypes: Sequence[torch.dtype],
        device: DeviceTier,
        ranks: Ranks,
        *,
        cut: bool,
        own_all: bool,
    ) -> None:
        self.index = index
        self.name = name
        self.layout = layout
        self.params = list(params)
        self.dtypes = list(dtypes)
        """Each parameter's dtype before sharding: what ``state_dict`` gives back."""
        self.cut = cut
        self.residence = Residence.ABSENT
        self._device = device
        self._ranks = ranks
        self._arrival: Work | None = None
        self.own_start = 0 if own_all else ranks.rank * layout.shard_numel
        self.own_numel = layout.padded_numel if own_all else layout.shard_numel
        self.states: dict[str, MemoryBlock] = {}
        self._flat_block = device.allocate(layout.flat_bytes, f"parameters of {name}")
        self.flat = self._flat_block.view(layout.dtype)
        self._views = [self.flat[slot.offset : slot.end].view(slot.shape) for slot in layout.slots]
        if cut:
            shard_bytes = layout.shard_numel * layout.dtype.itemsize
            self._shard_block: MemoryBlock | None = device.allocate(shard_bytes, f"parameter shard of {name}")
            self.shard = self._shard_block.view(layout.dtype)
            device.deflate(self._flat_block)
        else:
            self._shard_block = None
            self.shard = self.flat[ranks.rank * layout.shard_numel : (ranks.rank + 1) * layout.shard_numel]
        self._placeholder = _placeholder(layout.dtype, device.device)

    # -- parameters ---------------------------------------------------------------------------------------------------

    @property
    def flat_bytes(self) -> int:
        return self.layout.flat_bytes

    @property
    def fetch_bytes(self) -> int:
        """Device memory that a fetch takes beyond what is held anyway."""
        return self.layout.flat_bytes if self.cut else 0

    def begin_gather(self) -> None:
        """ABSENT to ARRIVING: takes memory (BudgetError when there is none) and starts the all-gather."""
        self._expect(Residence.ABSENT)
        if self.cut:
            self._device.inflate(self._flat_block)
        self.residence = Residence.ARRIVING
        if self._ranks.size > 1:
            with torch.no_grad(), _quietly(self.flat):
                self._arrival = self._ranks.all_gather(self.flat, self.shard)
        elif self.cut:
            with torch.no_grad(), _quietly(self.flat):
                self.flat.copy_(self.shard)

    def serve_gather(self) -> None:
        """Takes part in a gather that another rank needs. What this rank holds keeps its values."""
        if self.residence is Residence.ABSENT:
            self.begin_gather()
            return
        scratch = torch.empty_like(self.flat)
        self._ranks.all_gather(scratch, self.shard).wait()

    def finish_gather(self) -> None:
        """ARRIVING to RESIDENT: the parameters become views of the filled buffer."""
        self._expect(Residence.ARRIVING)
        if self._arrival is not None:
            self._arrival.wait()
            self._arrival = None
        self.attach()

    def attach(self) -> None:
        """Parameters become views of the flat buffer, which holds their values."""
        for param, view in zip(self.params, self._views, strict=True):
            param.data = view
        self.residence = Residence.RESIDENT

    def drop(self) -> None:
        """RESIDENT (or ARRIVING) to ABSENT: placeholders; the memory goes where parameters are cut."""
        if self._arrival is not None:
            self._arrival.wait()
            self._arrival = None
        if self.residence is Residence.ABSENT:
            raise RuntimeError(f"group {self.name} is dropped, but it is absent")
        self.detach()
        if self.cut:
            self._device.deflate(self._flat_block)

    def detach(self) -> None:
        """Parameters become placeholders. See [Note: placeholders]."""
        for slot in range(len(self.params)):
            self.detach_one(slot)
        self.residence = Residence.ABSENT

    def detach_one(self, slot: int) -> None:
        self.params[slot].data = self._placeholder.expand(self.layout.slots[slot].shape)

    def show(self, slot: int) -> None:
        """A parameter that was lent to the user shows again what its group's residence says."""
        if self.residence is Residence.RESIDENT:
            self.params[slot].data = self._views[slot]
        else:
            self.detach_one(slot)

    def view_of(self, slot: int) -> torch.Tensor:
        """The parameter's place in the flat buffer, whatever the parameter shows now."""
        return self._views[slot]

    # -- states this rank owns ----------------------------------------------------------------------------------------

    @property
    def own_param(self) -> torch.Tensor:
        """The owned run of the parameters in the compute dtype: what the update writes."""
        return self.flat if self.own_numel == self.layout.padded_numel and not self.cut else self.shard

    def owned_segments(self) -> tuple[Segment, ...]:
        """What of each parameter lies in the owned run; ``shard_start`` counts from the run's start."""
        if self.own_numel == self.layout.padded_numel:
            return tuple(Segment(i, 0, slot.offset, slot.numel) for i, slot in enumerate(self.layout.slots) if slot.numel)
        return self.layout.segments(self._ranks.rank)

    def state(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """A state over the owned run, zeros at first use."""
        if name not in self.states:
            block = self._device.allocate(self.own_numel * dtype.itemsize, f"{name} of {self.name}")
            block.data.zero_()
            self.states[name] = block
        return self.states[name].view(dtype)

    def has_state(self, name: str) -> bool:
        return name in self.states

    def free_state(self, name: str) -> None:
        self._device.free(self.states.pop(name))

    def _expect(self, residence: Residence) -> None:
        if self.residence is not residence:
            raise RuntimeError(f"group {self.name} is {self.residence.value}, expected {residence.value}")


def _quietly(tensor: torch.Tensor) -> AbstractContextManager[None]:
    """Writing inside does not count as a change: autograd's saved views of the flat buffer stay valid."""
    preserve: AbstractContextManager[None] = torch.autograd._unsafe_preserve_version_counter(tensor)  # type: ignore[attr-defined]
    return preserve


def _placeholder(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    value = float("nan") if dtype.is_floating_point or dtype.is_complex else torch.iinfo(dtype).min
    return torch.full((), value, dtype=dtype, device=device)
