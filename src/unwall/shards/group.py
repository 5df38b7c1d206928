"""The unit that moves: parameters laid end to end in one flat buffer, and this rank's part of their states.

[Note: residence]
ABSENT     parameters are placeholders; the flat buffer has no memory (or, when params are not cut, stale content).
ARRIVING   the flat buffer has memory and is being filled; parameters are still placeholders.
RESIDENT   the flat buffer is filled and every parameter is a view of it.
"""

import enum
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import nn

from unwall.native.library import DiskError
from unwall.shards.collectives import Collective, Ranks
from unwall.shards.compress import Codec, travels_packed
from unwall.shards.faces import Faces
from unwall.shards.flat import FlatBuffer
from unwall.shards.home import Home
from unwall.shards.layout import Layout
from unwall.shards.owned import Owned
from unwall.shards.packed_gather import PackedGather
from unwall.shards.replica import Replica
from unwall.shards.store import Staging, Store
from unwall.tiers.block import Region
from unwall.tiers.disk import named
from unwall.tiers.ticket import Ticket, end_of, order_after
from unwall.tiers.tiers import Tiers


class Residence(enum.Enum):
    """See [Note: residence]."""

    ABSENT = "absent"
    ARRIVING = "arriving"
    RESIDENT = "resident"


class Group(Owned):
    """An ordered list of parameters, their flat buffer, and the states this rank owns of them (shards/owned.py).

    ``shard`` is this rank's 1/N of the parameters in the compute dtype: a part of the flat buffer where that is kept
    whole, memory of its own where parameters are cut.
    """

    def __init__(
        self,
        index: int,
        name: str,
        layout: Layout,
        params: Sequence[nn.Parameter],
        dtypes: Sequence[torch.dtype],
        tiers: Tiers,
        ranks: Ranks,
        home: Home,
        staging: Staging,
        *,
        cut: bool,
        own_all: bool,
        gather_bits: int | None = None,
        replicated: bool = False,
    ) -> None:
        super().__init__(name, layout, tiers, ranks, staging, own_all=own_all)
        self.index = index
        self.params = list(params)
        self.dtypes = list(dtypes)
        """Each parameter's dtype before sharding: what ``state_dict`` gives back."""
        self.residence = Residence.ABSENT
        self._gathering: Collective | None = None
        self._copying: Ticket | None = None
        self._reading: Ticket | None = None
        self.at_once_bytes = 0  # the whole parameters of all groups that are read at once where a module of this one runs
        self.judged = False  # the plan was found to hold it with the states of AdamW
        self.several = False  # its gradient may land once for each of several modules that share a parameter
        self._cut = cut
        self._gather_bits = gather_bits if travels_packed(layout.dtype) else None
        self._replicated = replicated and ranks.nodes is not None
        self.replica: Replica | None = None
        """A second copy inside the node, if the plan wants one. See [Note: replica] in shards/replica.py."""
        self.live_at(home)
        self._whole = [slot.whole for slot in layout.slots]
        self.faces = Faces(self.params, layout, tiers.device.device)

    def live_at(self, home: Home, value: torch.Tensor | None = None) -> None:
        """Takes up a home. ``value``: the owned run, if it had another one, whose places the caller frees. All or nothing."""
        flat_is_home = home.params == "device" and not self._cut
        evictable = not flat_is_home and not home.resident
        param, label = None, f"parameter shard of group {self.name}"
        buffer = FlatBuffer(self._tiers.device, self.layout, self.name, evictable)
        if not flat_is_home:
            param = Store(self._tiers, self.pending, home.params, self.own_numel, self.layout.dtype, label, pinned=True)
        self._gathers = self._ranks.size > 1 and not (home.tier == "host" and self._own_all)
        replica = self._new_replica(home) if self._replicated and self._gathers and evictable else None
        if value is not None:
            own = buffer.tensor.narrow(0, self.own_start, self.own_numel) if param is None else param.tensor()
            own.copy_(value)
            self.pending.staging.close()
        self.home, self.buffer, self.evictable = home, buffer, evictable
        self.param, self.flat_is_home = param, flat_is_home
        if self.replica is not None:
            self.replica.free()
        self.replica = replica
        packs = self._gathers and not flat_is_home and self._gather_bits is not None
        self.packed = self._packed_gather() if packs else None
        """How parameters travel, where it is not as they are. See [Note: packed gathers] in shards/packed_gather.py."""

    def _new_replica(self, home: Home) -> Replica:
        assert self._ranks.nodes is not None
        return Replica(self._tiers, home.replica, self.layout, self._ranks.nodes.inside, self.name)

    def _packed_gather(self) -> PackedGather:
        codec, label = Codec(self._gather_bits or 8, lambda: self.pool), f"parameters of {self.name} on their way"
        return PackedGather(codec, self._tiers.device, self.layout, self._ranks, label)

    # -- parameters ---------------------------------------------------------------------------------------------------

    @property
    def fetch_bytes(self) -> int:
        """Device memory that a fetch takes beyond what is held anyway."""
        return self.layout.flat_bytes if self.evictable else 0

    @property
    def transit_bytes(self) -> int:
        """Device memory that a fetch takes beside that, and gives back when it has arrived."""
        return 0 if self.packed is None else self.packed.nbytes

    @property
    def travels(self) -> tuple[int, int, torch.dtype]:
        """What a gather exchanges: elements of a rank's part, of the whole, and their dtype."""
        if self.packed is not None:
            return self.packed.part_bytes, self.packed.nbytes, torch.uint8
        return self.layout.shard_numel, self.layout.padded_numel, self.layout.dtype

    @property
    def gathered_numel(self) -> int:
        """Elements of the flat buffer."""
        return self.layout.padded_numel

    @property
    def param_count(self) -> int:
        return len(self.params)

    @property
    def gathers(self) -> bool:
        """A fetch takes the other ranks' parts."""
        return self._gathers

    @property
    def updating(self) -> bool:
        """An update of the parameters is under way on the host."""
        return self.pending.updating

    @property
    def undecided(self) -> bool:
        """An update was made in place ahead of its step, and whoever fetches the group takes it back."""
        return self.pending.ahead is not None

    @property
    def updated_in_place(self) -> bool:
        """The update writes the flat buffer itself: what is gathered never is out of date."""
        return self.flat_is_home and self.own_numel == self.layout.padded_numel

    @property
    def near(self) -> bool:
        """A gather inside the node brings what the parameters are now."""
        return self.replica is not None and self.replica.counts(self.generation)

    @property
    def reading(self) -> Ticket | None:
        """The last copy of the parameters from the host, as long as it may be under way: whoever writes them there before the
        device has computed with it waits for this."""
        if self._reading is not None and self._reading.done():
            self._reading = None
        return self._reading

    def outdated(self) -> None:
        """The parameters change. The replica does not count any more."""
        if self.replica is not None:
            self.replica.outdated()

    def begin_gather(self) -> None:
        """ABSENT to ARRIVING: takes memory (BudgetError when there is none) and starts the all-gather."""
        self._expect(Residence.ABSENT)
        self.pending.settle_params()
        self.pending.staging.close()  # training goes on: the memory for looking at states is free again
        self.buffer.fill()
        self.residence = Residence.ARRIVING
        try:
            self._start_filling()
        except BaseException:
            self._give_up()
            raise

    def begin_near(self) -> None:
        """The same from the ranks of the node, which hold the values of before an update that is under way."""
        self._expect(Residence.ABSENT)
        assert self.replica is not None
        self.pending.staging.close()
        self.buffer.fill()
        self.residence = Residence.ARRIVING
        try:
            with torch.no_grad(), _quietly(self.flat):
                self._copying = self.replica.begin_bring(self.buffer)
                if self._copying is not None:
                    self.buffer.hold(self._copying)
                with self._behind_copy():
                    self._gathering = self.replica.gather(self.buffer)
                self.buffer.hold(self._gathering)
                self._ranks.traffic.gathered_bytes += self.replica.incoming_bytes
        except BaseException:
            self._give_up()
            raise

    def serve_near(self) -> None:
        """Takes part in a gather inside the node that another rank needs. What this rank holds keeps its values."""
        assert self.replica is not None
        self._await_arrival()  # which may be what fills the replica
        self.replica.serve()
        self._ranks.traffic.gathered_bytes += self.replica.incoming_bytes

    def _start_filling(self) -> None:
        with torch.no_grad(), _quietly(self.flat):
            if self.home.tier == "host":
                assert self.param is not None
                block = self.param.fetched_block
                part = Region(self.buffer.block, self.own_start * self.layout.dtype.itemsize, block.nbytes)
                self._copying = self._tiers.links.copy(Region.whole(block), part, self.name)
                self.buffer.hold(self._copying)
                self._reading = end_of(self._copying)
            if self._gathers:
                self._gathering = self._gather(self.flat, self._behind_copy())  # it reads what is being copied
                self.buffer.hold(self._gathering)
                if self.replica is not None:
                    self.replica.await_gather(self.generation)

    def serve_gather(self) -> None:
        """Takes part in a gather that another rank needs. What this rank holds keeps its values."""
        if self.residence is Residence.ABSENT:
            self.begin_gather()
            return
        if not self._gathers:
            return
        self._await_copy()
        self._gather(None, nullcontext()).wait()
        if self.replica is not None:
            self.replica.await_gather(self.generation)
            if self.residence is Residence.RESIDENT:
                self.replica.fill(self.buffer)

    def _gather(self, into: torch.Tensor | None, behind: AbstractContextManager[None]) -> Collective:
        """Everybody's part, on its way ``into`` the flat buffer, or to nowhere."""
        _, numel, dtype = self.travels
        self._ranks.traffic.gathered_bytes += self._ranks.from_others(numel * dtype.itemsize)
        self._ranks.traffic.gathered_far_bytes += self._ranks.from_far(numel * dtype.itemsize)
        if self.packed is not None:
            return self.packed.begin(into, self._gather_source(), behind)
        with behind:
            return self._ranks.all_gather(torch.empty_like(self.flat) if into is None else into, self._gather_source())

    def finish_gather(self) -> None:
        """ARRIVING to RESIDENT: the parameters become views of the filled buffer."""
        self._expect(Residence.ARRIVING)
        self._await_arrival()
        self.attach()

    def attach(self) -> None:
        """Parameters become views of the flat buffer, which holds their values."""
        self.faces.show_all(self.buffer.views, self._whole)
        self.residence = Residence.RESIDENT
        self.faces.opened()

    def close(self) -> None:
        """No pass uses the group any more, or it is about to be dropped."""
        self.faces.close(self.flat if self.residence is Residence.RESIDENT else None)

    def drop(self) -> None:
        """RESIDENT (or ARRIVING) to ABSENT: placeholders; the memory goes where parameters are cut."""
        if self.residence is Residence.ABSENT:
            raise RuntimeError(f"group {self.name} is dropped, but it is absent")
        self._await_arrival()
        self.close()
        self.detach()
        if self.replica is not None:
            self.replica.let_go()
        self.buffer.empty()

    def _await_arrival(self) -> None:
        self._await_copy()
        if self._gathering is not None:
            self._gathering.wait()
            self._gathering = None
        self.buffer.settled()
        if self.replica is not None:
            self.replica.fill(self.buffer)

    def _await_copy(self) -> None:
        """What is queued from now on comes after the copy. On an accelerator a stream waits, not this thread."""
        if self._copying is None:
            return
        with self._giving_up():
            order_after(self._copying, self._tiers.device.device)
        self._copying = None

    @contextmanager
    def _behind_copy(self) -> Iterator[None]:
        """The gather that is begun inside comes after the copy, and so does whoever waits for the gather."""
        behind = nullcontext() if self._copying is None else self._ranks.behind(self._copying)
        with self._giving_up(), behind:
            yield
        self._copying = None

    @contextmanager
    def _giving_up(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            self._give_up()
            if isinstance(error, DiskError):
                raise named(error, f"reading the parameters of group {self.name}") from error
            raise

    def _give_up(self) -> None:
        """A fetch failed: ABSENT, so that the next use tries again."""
        self._copying = self._gathering = None
        self.outdated()
        if self.residence is not Residence.ABSENT:
            self.detach()
            self.buffer.empty()

    def _gather_source(self) -> torch.Tensor:
        if self.home.tier == "host" or self.flat_is_home:
            return self.flat.narrow(0, self._ranks.rank * self.layout.shard_numel, self.layout.shard_numel)
        assert self.param is not None
        return self.param.tensor(write=False)

    def detach(self) -> None:
        """Parameters become placeholders."""
        self.faces.put_away()
        self.residence = Residence.ABSENT

    def show(self, slot: int) -> None:
        """A parameter that was lent to the user shows again what its group's residence says. One that lies in several slots is
        never shown: whoever computes with it takes the views of its parts."""
        if self.residence is Residence.RESIDENT and self._whole[slot]:
            self.faces.show(slot, self.buffer.views[slot])
            if not self.faces.is_open:
                self.faces.hide(slot)
        else:
            self.faces.put_away_one(slot)

    def view_of(self, slot: int) -> torch.Tensor:
        """The slot's place in the flat buffer, whatever the parameter shows now."""
        return self.buffer.views[slot]

    def _expect(self, residence: Residence) -> None:
        if self.residence is not residence:
            raise RuntimeError(f"group {self.name} is {self.residence.value}, expected {residence.value}")


def close_all(groups: Iterable[Group]) -> None:
    """A pass, or a part of one, is over."""
    for group in groups:
        if group.faces.is_open:
            group.close()


def _quietly(tensor: torch.Tensor) -> AbstractContextManager[None]:
    """Writing inside does not count as a change: autograd's saved views of the flat buffer stay valid."""
    preserve: AbstractContextManager[None] = torch.autograd._unsafe_preserve_version_counter(tensor)  # type: ignore[attr-defined]
    return preserve
