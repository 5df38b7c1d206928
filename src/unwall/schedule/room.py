"""Room on the device: what is dropped, waited for or reduced early so that something fits.

[Note: room]
An accepted budget is always enough. Where room is short the executor goes on to what costs more: it drops groups that nothing
pins, waits for reductions under way, drops groups with soft pins ([Note: two kinds of pins] in schedule/pins.py), and reduces
gradients of which only a part has arrived; the rest follows and is added. So in the end only what is read at this moment and
one gradient must fit. A rank may start a reduction only where it takes part in no other collective. Before it does, it
therefore makes room for what another rank may ask it to serve meanwhile, too.
"""

from collections.abc import Sequence
from typing import Generic, TypeVar

from unwall.schedule.backend import GradientBackend, GroupBackend
from unwall.schedule.limit import Limit
from unwall.schedule.pins import Pins
from unwall.schedule.residency import Occupant, choose_drops
from unwall.schedule.trace import Trace
from unwall.shards.group import Residence
from unwall.tiers.ledger import BudgetError, Ledger

AnyGroup = TypeVar("AnyGroup", bound=GroupBackend)
AnyGradient = TypeVar("AnyGradient", bound=GradientBackend)


class Room(Generic[AnyGroup, AnyGradient]):
    """What takes memory on the device, within the budget of its ``ledger``, and what of it can go. See [Note: room]."""

    def __init__(self, groups: Sequence[AnyGroup], gradients: Sequence[AnyGradient], ledger: Ledger, ranks: int) -> None:
        self.groups = groups
        self.gradients = gradients
        self.trace = Trace()
        self.pins = Pins(len(groups))
        self.alone = ranks == 1
        """There is one rank."""
        self._ledger = ledger
        self._ranks = ranks
        self._limit: Limit | None = None
        self._fetched: set[int] = set()  # that take memory to be here; some may have been dropped since
        self._ahead: dict[int, int] = {}
        """Groups that were fetched ahead and are not used yet, and their elements."""
        self._clear = 0
        """Every use of this pass before this one finds its group present."""
        self.emptied = 0
        """How often the cache was dropped."""
        self._acting = 0  # collectives over several ranks that this rank takes part in now

    def _measure_room(self) -> None:
        """Groups were added, or have other homes."""
        self._fetch_bytes = [group.fetch_bytes for group in self.groups]
        self._largest_fetch = max(group.fetch_bytes + group.transit_bytes for group in self.groups)
        self._largest_reduce = max(gradient.reduce_bytes for gradient in self.gradients)

    def reduce(self, index: int, complete: bool = True) -> None:
        """Sums what has arrived of a group's gradient over the ranks."""
        raise NotImplementedError

    def finish_reduces(self, leave: int = 0, departed: bool = True) -> None:
        """Waits for sums under way, until only ``leave`` are left."""
        raise NotImplementedError

    def keep_within(self, limit: Limit | None) -> None:
        """From now on groups are dropped to stay within ``limit``, as far as they can be."""
        self._limit = limit

    def make_room(self, nbytes: int, label: str, keep: int | None = None, advice: str = "") -> None:
        """Finds room for ``nbytes`` in the device budget, as [Note: room] says. BudgetError when what is in use does not allow
        it. ``keep``: the group whose gradient is about to be filled, which is not reduced for it. ``advice``: for the error."""
        if self._find_room(nbytes) or (self._reduce_early(keep) and self._find_room(nbytes)):
            return
        ledger = self._ledger
        if self._limit is not None:
            self.drop_cache()  # the limit refuses nothing
        if ledger.budget_bytes is not None and ledger.live_bytes + nbytes > ledger.budget_bytes:
            raise BudgetError("device", nbytes, ledger.live_bytes, ledger.budget_bytes, label, advice)

    def make_room_before(self, nbytes: int, keep: int | None = None) -> None:
        """Before a collective over several ranks: reduces early what would be in the way of it, or of what is served first."""
        if self._ranks == 1 or self._acting or self._free_bytes() is None:
            return
        nbytes += max(self._largest_fetch, self._largest_reduce)
        if not any(gradient.pending for gradient in self.gradients) or self._could_hold(nbytes):
            return
        self.finish_reduces()
        if not self._could_hold(nbytes):
            self._reduce_early(keep)

    @property
    def fits_all(self) -> bool:
        """Whether ``fits`` says so whatever it is asked."""
        return self._ranks == 1 and self._ledger.budget_bytes is None and self._limit is None

    def fits(self, nbytes: int) -> bool:
        """Whether a rank alone has ``nbytes`` to spare as it is, so that ``make_room`` has nothing to do."""
        if self._ranks != 1:
            return False
        budget, limit = self._ledger.budget_bytes, self._limit
        needed = self._ledger.live_bytes + nbytes
        return (budget is None or needed <= budget) and (limit is None or needed <= limit.nbytes)

    def has_room(self, nbytes: int) -> bool:
        """Whether ``nbytes`` fit beside what two groups and one reduction take at most. Drops nothing."""
        return self._could_hold(nbytes + 2 * self._largest_fetch + self._largest_reduce)

    def expect_room(self, nbytes: int, label: str, advice: str) -> None:
        """BudgetError where that is not so. Without a budget nothing is refused."""
        ledger = self._ledger
        if ledger.budget_bytes is not None and not self.has_room(nbytes):
            raise BudgetError("device", nbytes, ledger.live_bytes, ledger.budget_bytes, label, advice)

    def _could_hold(self, nbytes: int) -> bool:
        """Whether there would be room after dropping what nothing reads now."""
        free = self._free_bytes()
        if free is None or nbytes <= free:
            return True
        droppable = (occupant.nbytes for occupant in self._occupants(soft=True) if not occupant.pinned)
        return nbytes <= free + sum(droppable)

    def _stay_within(self) -> None:
        if not self._drop_for(0):
            self.drop_cache(soft=False)

    def drop_cache(self, soft: bool = True) -> None:
        """Drops everything that nothing reads now, or nothing pins: memory is needed that the card does not have."""
        self.emptied += 1
        for occupant in self._occupants(soft):
            if not occupant.pinned:
                self.pins.give_up(occupant.group)
                self._drop(occupant.group)

    def _free_bytes(self) -> int | None:
        """What the budget and the limit leave. None where there is neither."""
        budget, limit = self._ledger.budget_bytes, self._limit
        if budget is None and limit is None:
            return None
        live = self._ledger.live_bytes
        if limit is None:
            return None if budget is None else budget - live
        return limit.nbytes - live if budget is None or limit.nbytes < budget else budget - live

    def _find_room(self, nbytes: int) -> bool:
        if self._drop_for(nbytes):
            return True
        self.finish_reduces()  # gives the flat gradients back that are on their way
        return self._drop_for(nbytes) or self._drop_for(nbytes, soft=True)

    def _reduce_early(self, keep: int | None) -> bool:
        """Sums what has arrived of gradients that are not complete. False where there are none, or it cannot be done now."""
        if self._acting:
            return False
        found = [index for index, gradient in enumerate(self.gradients) if index != keep and gradient.pending]
        for index in found:
            self.reduce(index, complete=False)
        self.finish_reduces()
        return bool(found)

    def _drop_for(self, nbytes: int, sooner_than: int | None = None, soft: bool = False) -> bool:
        """Drops what is needed last, as far as ``nbytes`` need it. False, and nothing is dropped, where that is not enough.

        ``sooner_than``: what is needed at this distance or sooner stays. ``soft``: soft pins are given up, too."""
        free = self._free_bytes()
        if free is None or nbytes <= free:
            return True
        drops = choose_drops(self._occupants(soft), self.trace.next_use(), nbytes - free, sooner_than)
        for index in drops or ():
            self.pins.give_up(index)
            self._drop(index)
        return drops is not None

    def _drop(self, index: int) -> None:
        self._ahead.pop(index, None)
        self._clear = min(self._clear, self.trace.position + self.trace.next_use().get(index, self._clear))
        self.groups[index].drop()

    def _occupants(self, soft: bool = False) -> list[Occupant]:
        groups, absent = self.groups, Residence.ABSENT
        self._fetched = {index for index in self._fetched if groups[index].residence is not absent}
        pinned = self.pins.must_stay(self._fetched) if soft else self.pins.should_stay(self._fetched)
        return [Occupant(index, self._fetch_bytes[index], index in pinned) for index in self._fetched]
