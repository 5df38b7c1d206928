"""Acts on the schedule: fetches what is used, works ahead, drops what is needed last, agrees with the other ranks.

[Note: room]
An accepted budget is always enough. Where room is short the executor goes on to what costs more: it drops groups that nothing
pins, waits for reductions under way, drops groups with soft pins ([Note: two kinds of pins] in schedule/pins.py), and reduces
gradients of which only a part has arrived; the rest follows and is added. So in the end only what is read at this moment and
one gradient must fit. A rank may start a reduction only where it takes part in no other collective. Before it does, it
therefore makes room for what another rank may ask it to serve meanwhile, too.
"""

from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Generic, TypeVar

from unwall.native.library import DiskError
from unwall.schedule.backend import Acts, AgreementBackend, GradientBackend, GroupBackend, Lane
from unwall.schedule.limit import Limit
from unwall.schedule.pins import Pins
from unwall.schedule.present import Present
from unwall.schedule.residency import Occupant, choose_drops, may_fetch_ahead, next_missing
from unwall.schedule.trace import Trace
from unwall.shards.control import pack_bits
from unwall.shards.group import Residence
from unwall.tiers.ledger import BudgetError, Ledger

LOOK_AHEAD = 2
"""Groups that may be fetched ahead at once: enough to keep a link busy, few enough to bound memory. See [Note: how far ahead]
in schedule/residency.py."""
REDUCES_IN_FLIGHT = 2
"""Gradients that may be on their way over the ranks at once (each holds a flat buffer)."""

AnyGroup = TypeVar("AnyGroup", bound=GroupBackend)
AnyGradient = TypeVar("AnyGradient", bound=GradientBackend)


class Executor(Generic[AnyGroup, AnyGradient]):
    """Keeps the groups that are in use on the device, within the budget of its ``ledger``.

    A group is pinned while anything may read it. Everything else stays for as long as there is room. See [Note: room].
    It knows groups, gradients and ranks by what is in schedule/backend.py only ([Note: two backends]).
    """

    def __init__(
        self,
        groups: Sequence[AnyGroup],
        gradients: Sequence[AnyGradient],
        ledger: Ledger,
        ranks: int,
        lane: Lane,
        make_agreement: Callable[[Acts], AgreementBackend],
    ) -> None:
        self.groups = groups
        self.gradients = gradients
        self.trace = Trace()
        self.gathered_elements = 0
        self.reduced_elements = 0
        self.lane = lane
        self._ledger = ledger
        self._ranks = ranks
        self._present = Present(groups)
        self._fetched: set[int] = set()  # that take memory to be here; some may have been dropped since
        self._ahead: dict[int, int] = {}
        """Groups that were fetched ahead and are not used yet, and their elements."""
        self._clear = 0
        """Every use of this pass before this one finds its group present."""
        self.pins = Pins(len(groups))
        self._reducing: deque[int] = deque()
        self._reduced: list[int] = []
        self._pieces: set[int] = set()  # groups of whose gradient only a part was reduced yet
        self._limit: Limit | None = None
        self._measure()
        ledger.ask_before_refusing(self.drop_cache)
        self._acting = 0  # collectives over several ranks that this rank takes part in now
        self.agreement = make_agreement(self)

    def keep_within(self, limit: Limit | None) -> None:
        """From now on groups are dropped to stay within ``limit``, as far as they can be."""
        self._limit = limit

    def _measure(self) -> None:
        alone = self._ranks == 1
        self.stays = [alone and group.fetch_bytes == 0 and group.updated_in_place for group in self.groups]
        """By group: once it is here nothing drops it, fetches it or changes where it is. Nothing is to be done at its uses."""
        self.all_stay = all(self.stays)
        self._largest = max(group.gathered_numel for group in self.groups)
        self._largest_fetch = max(group.fetch_bytes + group.transit_bytes for group in self.groups)
        self._largest_reduce = max(gradient.reduce_bytes for gradient in self.gradients)

    def begin_pass(self, kind: Hashable) -> None:
        """A forward begins, and nothing is in use. ``kind``: see ``Trace``."""
        self.unpin_all()
        self.trace.begin(kind)
        self._clear = 0
        self._ahead.clear()
        if self._limit is not None:
            self._limit.begin(kind)
            self._stay_within()

    # -- parameters ---------------------------------------------------------------------------------------------------

    def use(self, index: int) -> None:
        """Makes a group resident and pins it; then works ahead. Raises, and pins nothing, when it cannot be fetched."""
        new = self.trace.record(index)
        self.pins.current = index
        self.pins.add(index)
        self._ahead.pop(index, None)
        try:
            if new:
                self.lane.leave()
                if self._limit is not None:
                    self._limit.used()
                    self._stay_within()
            if self.groups[index].residence is not Residence.RESIDENT:
                self._make_resident(index)
            if new:
                self.lane.enter(self.groups[index].name)
                self._work_ahead()
        except BaseException as error:
            self.pins.remove(index)
            self.agreement.fail(error)
            raise

    def use_staying(self, index: int) -> None:
        """The same for a group that ``stays``: only its first use finds something to do."""
        if self.groups[index].residence is not Residence.RESIDENT:
            self._make_resident(index)

    def mark(self, index: int) -> None:
        """What is computed from now on belongs to this group, which is here, on the time line."""
        self.lane.leave()
        self.lane.enter(self.groups[index].name)

    def release(self, index: int) -> None:
        """Takes back the pin of one ``use``."""
        if not self.pins.is_hard(index):
            raise RuntimeError(f"group {self.groups[index].name} is released, but nothing uses it")
        self.pins.remove(index)

    def pin(self, index: int) -> None:
        """Makes a group resident and pins it softly, unless it is: it stays for as long as there is room."""
        if self.pins.is_soft(index):
            self.trace.record(index)
            return
        self.use(index)
        self.pins.soften(index)

    def unpin_all(self) -> None:
        """Nothing is in use (the start of a pass, or after an exception)."""
        self.pins.clear()

    def grown(self) -> None:
        """Groups were added, or have other homes."""
        self.pins.grow(len(self.groups))
        self._measure()

    def is_pinned(self, index: int) -> bool:
        return self.pins.is_hard(index) or self.pins.is_soft(index)

    def invalidate(self, index: int) -> None:
        """The shards changed: what was gathered of this group is out of date."""
        group = self.groups[index]
        group.outdated()
        if group.residence is not Residence.ABSENT and not group.updated_in_place:
            self._drop(index)

    def make_room(self, nbytes: int, label: str, keep: int | None = None) -> None:
        """Finds room for ``nbytes`` in the device budget, as [Note: room] says. BudgetError when what is in use does not allow
        it. ``keep``: the group whose gradient is about to be filled, which is not reduced for it."""
        if self._find_room(nbytes) or (self._reduce_early(keep) and self._find_room(nbytes)):
            return
        ledger = self._ledger
        if self._limit is not None:
            self.drop_cache()  # the limit refuses nothing
        if ledger.budget_bytes is not None and ledger.live_bytes + nbytes > ledger.budget_bytes:
            raise BudgetError("device", nbytes, ledger.live_bytes, ledger.budget_bytes, label)

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

    def fits(self, nbytes: int) -> bool:
        """Whether a rank alone has ``nbytes`` to spare as it is, so that ``make_room`` has nothing to do."""
        if self._ranks != 1:
            return False
        budget, limit = self._ledger.budget_bytes, self._limit
        if budget is None and limit is None:
            return True
        needed = self._ledger.live_bytes + nbytes
        return (budget is None or needed <= budget) and (limit is None or needed <= limit.nbytes)

    def has_room(self, nbytes: int) -> bool:
        """Whether ``nbytes`` fit beside what two groups and one reduction take at most. Drops nothing."""
        return self._could_hold(nbytes + 2 * self._largest_fetch + self._largest_reduce)

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
        for occupant in self._occupants(soft):
            if not occupant.pinned:
                self.pins.give_up(occupant.group)
                self._drop(occupant.group)

    def _free_bytes(self) -> int | None:
        """What the budget and the limit leave. None where there is neither."""
        left, limit = self._ledger.free_bytes, self._limit
        if limit is None:
            return left
        within = limit.nbytes - self._ledger.live_bytes
        return within if left is None else min(left, within)

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
        pinned, groups, absent = self.pins.must_stay() if soft else self.pins.should_stay(), self.groups, Residence.ABSENT
        self._fetched = {index for index in self._fetched if groups[index].residence is not absent}
        return [Occupant(index, groups[index].fetch_bytes, pinned(index)) for index in self._fetched]

    def _make_resident(self, index: int) -> None:
        group = self.groups[index]
        if group.residence is Residence.ABSENT:
            self.make_room_before(group.fetch_bytes + group.transit_bytes)
            self.agreement.gather(index, group.near)
        if group.residence is Residence.ARRIVING:
            group.finish_gather()

    def _begin_gather(self, index: int, near: bool) -> None:
        group = self.groups[index]
        self.make_room(group.fetch_bytes + group.transit_bytes, f"parameters of {group.name}")
        if group.fetch_bytes:
            self._fetched.add(index)
        (group.begin_near if near else group.begin_gather)()
        self.gathered_elements += group.gathered_numel if self._ranks > 1 else 0

    def _work_ahead(self) -> None:
        """Starts fetching the next missing groups, where that pushes out nothing that is needed sooner.

        Nothing here may depend on how far this rank's updates are: with several ranks all fetch the same groups at the same
        points, so a collective of the user's own between two modules comes at the same place in the order of each rank."""
        if not self.trace.known:
            return
        while True:
            found = self._next_missing()
            if found is None:
                return
            index, distance = found
            group = self.groups[index]
            if not may_fetch_ahead(self._ahead.values(), group.gathered_numel, self._largest, LOOK_AHEAD):
                return
            if not self.agreement.may_gather_ahead(index, group.near):
                return
            if group.undecided or (group.updating and self._ranks == 1):
                return  # never wait for what is not needed yet: compute that could be queued meanwhile would wait, too
            if not self._drop_for(group.fetch_bytes + group.transit_bytes, sooner_than=distance):
                return
            self.agreement.gather(index, group.near)
            self._ahead[index] = group.gathered_numel

    def _next_missing(self) -> tuple[int, int] | None:
        """The next use that finds its group absent, and how far ahead it is. Each use is looked at once, unless what it needs
        is dropped again."""
        at = self.trace.position
        skip = max(0, self._clear - at)
        found = next_missing(self.trace.upcoming(skip, beyond=LOOK_AHEAD), self._present, skip)
        self._clear = max(self.trace.length, at + LOOK_AHEAD) if found is None else at + found[1]
        return found

    # -- gradients ----------------------------------------------------------------------------------------------------

    def reduce(self, index: int, complete: bool = True) -> None:
        """Sums a group's gradient over the ranks (in the background) and remembers which parameters have one.

        Not ``complete``: more of it is to come in this backward."""
        (self._pieces.discard if complete else self._pieces.add)(index)
        gradient = self.gradients[index]
        if self._ranks == 1:
            self.finish_reduces(leave=REDUCES_IN_FLIGHT - 1)
            self._find_room(gradient.flat_bytes)
            gradient.begin_reduce(gradient.pending)
            self._reducing.append(index)
            if not gradient.leaves:
                self.finish_reduces()
            return
        bits = pack_bits(sorted(gradient.pending), self.groups[index].param_count)
        self.agreement.reduce(index, bits)

    def finish_reduces(self, leave: int = 0, departed: bool = True) -> None:
        """Waits for reductions under way, the oldest first, until only ``leave`` are left.

        ``departed``: also waits until what leaves the device has left it. Otherwise the host, which runs ahead of the device,
        would queue so many sums that the device held the gradients of the whole model at once."""
        while len(self._reducing) > leave:
            index = self._reducing[0]
            self.gradients[index].finish_reduce()  # first: it may be interrupted, and called again
            self._reducing.popleft()
            if index not in self._pieces:
                self._reduced.append(index)
            if departed:
                self.gradients[index].await_departure()

    def end_pieces(self) -> None:
        """Backward has ended: what was reduced of a gradient is all there is of it."""
        self._reduced += sorted(index for index in self._pieces if index not in self._reducing)
        self._pieces.clear()

    @property
    def has_reduced(self) -> bool:
        """Whether ``take_reduced`` would give any."""
        return bool(self._reduced)

    def take_reduced(self) -> list[int]:
        """The groups whose sum has left for where its update runs since this was last asked. Only noted here, for the engine to
        hand out: an optimizer that is told may wait for an update, and nobody who makes room should."""
        found, self._reduced = self._reduced, []
        return list(dict.fromkeys(found))

    # -- with the other ranks -----------------------------------------------------------------------------------------

    def end_forward(self, grad: bool, sync: bool) -> None:
        """The outermost forward ends. Serves the other ranks until theirs do."""
        self.agreement.end_forward(grad, sync, self.trace.known)

    def end_backward(self, sync: bool) -> None:
        self.agreement.end_backward(sync, self.trace.known, any(gradient.pending for gradient in self.gradients))

    def end_step(self, meet: bool = False) -> None:
        """Nothing is left to reduce on this rank. Returns when that is so on all of them. ``meet``: they say so in any case."""
        self.agreement.end_step(self.trace.known, meet)

    def together(self, what: str) -> None:
        """Something that all ranks must call at once: ``what``, in a word or two, as its user calls it ("state_dict").

        One exchange. DivergedError on every rank, instead of a hang, when one of them is at something else; it says who called
        what."""
        self.agreement.together(what)

    def prepared(self, what: str) -> AbstractContextManager[None]:
        """The same at the end of what is inside, which each rank does alone (reading its shard from disk) before a collective.
        Where that fails on one rank, all raise: it its own error, the others PeerError."""
        return self.agreement.prepared(what)

    def note(self, what: str) -> None:
        """The same without an exchange, for what runs often ("clip_grad_norm_"): whether all ranks called it is compared at
        their next exchange."""
        self.agreement.note(what)

    def abandon(self, spoilt: bool) -> None:
        """A pass failed on some rank: what was gathered may hold nothing of use, and so may, if ``spoilt``, the gradients."""
        for index in range(len(self.groups)):
            with suppress(DiskError):
                self.invalidate(index)
        if spoilt:
            self._reducing.clear()
            self._reduced.clear()
            for gradient in self.gradients:
                with suppress(DiskError):
                    gradient.clear()

    def join_gather(self, index: int, near: bool = False) -> None:
        """Takes part in a gather, whether this rank needs it or another one. ``near``: inside the node."""
        with self._taking_part():
            group = self.groups[index]
            if group.residence is Residence.ABSENT and (group.near or not near):
                self._begin_gather(index, near)
            else:
                (group.serve_near if near else group.serve_gather)()

    def join_reduce(self, index: int, present: set[int], contribute: bool) -> None:
        """Takes part in a reduction. Without ``contribute`` another rank needs it: this one adds zeros."""
        gradient = self.gradients[index]
        with self._taking_part():
            self.finish_reduces(leave=REDUCES_IN_FLIGHT - 1)
            nbytes = gradient.flat_bytes if contribute else gradient.reduce_bytes
            self.make_room(nbytes, f"gradients of {self.groups[index].name}")
            gradient.begin_reduce(present, contribute=contribute)
        self._reducing.append(index)
        self.reduced_elements += self.groups[index].gathered_numel

    @contextmanager
    def _taking_part(self) -> Iterator[None]:
        """Over several ranks nothing else may be agreed on meanwhile."""
        self._acting += self._ranks > 1
        try:
            yield
        finally:
            self._acting -= self._ranks > 1

    def present_in(self, index: int) -> set[int]:
        """A group's parameters that have a gradient on some rank."""
        return self.gradients[index].present

    def correct_present(self, index: int, wrong: set[int], missing: set[int]) -> None:
        """It turned out which parameters do have a gradient on some rank."""
        gradient = self.gradients[index]
        if gradient.held or index in self._reducing:  # otherwise it was forgotten meanwhile
            gradient.present |= missing
        gradient.present -= wrong
        if not gradient.present and not gradient.pending:
            gradient.clear()
