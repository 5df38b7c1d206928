"""What one rank keeps of a group's states: a run of flat elements, each state in a place of its own."""

import torch

from unwall.native.pool import WorkerPool
from unwall.shards.collectives import Ranks
from unwall.shards.flat import FlatBuffer
from unwall.shards.home import Home
from unwall.shards.layout import Layout, Segment
from unwall.shards.states import GROUP, StateKey, StateSpec
from unwall.shards.store import Pending, Staging, Store
from unwall.tiers.ledger import TierName
from unwall.tiers.tiers import Tiers


class Owned:
    """The run of a group's flat elements whose gradient, master and optimizer state this rank keeps, and those states.

    Its 1/N, or everything at stage 0 (``own_all``). Where they live is the group's ``home``.
    """

    home: Home
    buffer: FlatBuffer
    param: Store | None
    """The owned run of the parameters, where it has a place of its own."""
    flat_is_home: bool
    """The flat buffer is where the parameters live: nothing has to be fetched, and it is never dropped."""

    def __init__(self, name: str, layout: Layout, tiers: Tiers, ranks: Ranks, staging: Staging, *, own_all: bool) -> None:
        self.name = name
        self.layout = layout
        self.own_start = 0 if own_all else ranks.rank * layout.shard_numel
        self.own_numel = layout.padded_numel if own_all else layout.shard_numel
        self.pending = Pending(staging)
        self.generation = 0
        """Counts changes of the states other than by updates: what was computed from them before is out of date."""
        self.states: dict[StateKey, Store] = {}
        self.copies = 1
        """On how many tensor ranks each element is kept: norms count it once."""
        self.lean = False
        """Its master has 24 bits, and its moments a byte each: ``AdamW(states="lean")``."""
        self._tiers = tiers
        self._ranks = ranks
        self._own_all = own_all
        self._segments: tuple[Segment, ...] | None = None

    @property
    def flat(self) -> torch.Tensor:
        """The whole parameters, end to end, where they are gathered."""
        return self.buffer.tensor

    @property
    def pool(self) -> WorkerPool:
        """Workers for host memory."""
        assert self._tiers.host.pool is not None
        return self._tiers.host.pool

    @property
    def own_param(self) -> torch.Tensor:
        """The owned run of the parameters in the compute dtype: what the update writes."""
        return self.own_param_for(write=True)

    def own_param_for(self, write: bool) -> torch.Tensor:
        """The same; without ``write`` it must not be changed."""
        if self.param is not None:
            return self.param.tensor(write)
        if write:
            self.buffer.block.await_reader()
        return self.flat.narrow(0, self.own_start, self.own_numel)

    def owned_segments(self) -> tuple[Segment, ...]:
        """What of each parameter lies in the owned run; ``shard_start`` counts from the run's start."""
        if self._segments is None:
            slots = enumerate(self.layout.slots)
            if self.own_numel == self.layout.padded_numel:
                self._segments = tuple(Segment(i, slot.start, slot.offset, slot.numel) for i, slot in slots if slot.numel)
            else:
                self._segments = self.layout.segments(self._ranks.rank)
        return self._segments

    def await_readers(self) -> None:
        """Before the group's states are changed on the caller's thread: a snapshot that is being written has read them."""
        if self.flat_is_home:
            self.buffer.block.await_reader()
        for store in (*([] if self.param is None else [self.param]), *self.states.values()):
            store.await_reader()

    def state(self, spec: StateSpec, owner: int = GROUP, write: bool = True) -> torch.Tensor:
        """A state over the owned run; it comes into being at first use. Without ``write`` it must not be changed."""
        return self.store(spec, owner).tensor(write)

    def store(self, spec: StateSpec, owner: int = GROUP) -> Store:
        """The same where it lives."""
        key = spec.key(owner)
        if key not in self.states:
            self.states[key] = self.make_store(spec, owner)
        return self.states[key]

    def make_store(self, spec: StateSpec, owner: int = GROUP) -> Store:
        """Room for a state, which the group does not know yet."""
        label, tier = f"{spec.name} of group {self.name}", tier_of(spec.key(owner), self.home)
        made = Store(self._tiers, self.pending, tier, self.own_numel, spec.dtype, label)
        if spec.initial:
            try:
                made.tensor().fill_(spec.initial)
            except BaseException:
                made.free()
                raise
        return made

    def has_state(self, spec: StateSpec, owner: int = GROUP) -> bool:
        return spec.key(owner) in self.states

    def free_state(self, key: StateKey) -> None:
        self.states.pop(key).free()


def tier_of(key: StateKey, home: Home) -> TierName:
    """Where a state of a group lives. What belongs to the group itself is its master."""
    return home.master if key.owner == GROUP else home.states
