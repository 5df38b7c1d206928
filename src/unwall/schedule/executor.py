"""Acts on the schedule: fetches what is used, works ahead, has gradients reduced, agrees with the other ranks."""

from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress

import torch

from unwall.native.library import DiskError
from unwall.schedule.backend import Acts, AgreementBackend, Lane
from unwall.schedule.present import Present
from unwall.schedule.residency import may_fetch_ahead, next_missing
from unwall.schedule.room import AnyGradient, AnyGroup, Room
from unwall.shards.control import pack_bits
from unwall.shards.group import Residence
from unwall.tiers.ledger import Ledger

LOOK_AHEAD = 2
"""Groups that may be fetched ahead at once: enough to keep a link busy, few enough to bound memory. See [Note: how far ahead]
in schedule/residency.py."""
REDUCES_IN_FLIGHT = 2
"""Gradients that may be on their way over the ranks at once (each holds a flat buffer)."""


class Executor(Room[AnyGroup, AnyGradient]):
    """Keeps the groups that are in use on the device, within the budget of its ``ledger``.

    A group is pinned while anything may read it. Everything else stays for as long as there is room (schedule/room.py).
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
        super().__init__(groups, gradients, ledger, ranks)
        self.gathered_elements = 0
        self.reduced_elements = 0
        self.lane = lane
        self._present = Present(groups)
        self._reducing: deque[int] = deque()
        self.reduced: list[int] = []
        """Groups that ``take_reduced`` would give, perhaps some of them twice."""
        self._pieces: set[int] = set()  # groups of whose gradient only a part was reduced yet
        self._measure()
        ledger.ask_before_refusing(self.drop_cache)
        self.agreement = make_agreement(self)

    def _measure(self) -> None:
        alone = self._ranks == 1
        self.stays = [alone and group.fetch_bytes == 0 and group.updated_in_place for group in self.groups]
        """By group: once it is here nothing drops it, fetches it or changes where it is. Nothing is to be done at its uses."""
        self.all_stay = all(self.stays)
        self._largest = max(group.gathered_numel for group in self.groups)
        self._measure_room()

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
        new, group, pins = self.trace.record(index), self.groups[index], self.pins
        pins.current = index
        pins.hard[index] += 1
        self._ahead.pop(index, None)
        try:
            if new:
                self.lane.leave()
                if self._limit is not None:
                    self._limit.used()
                    self._stay_within()
            if group.residence is not Residence.RESIDENT:
                self._make_resident(index)
            if new:
                self.lane.enter(group.name)
                self._work_ahead()
        except BaseException as error:
            pins.hard[index] -= 1
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
        hard = self.pins.hard
        if hard[index] <= 0:
            raise RuntimeError(f"group {self.groups[index].name} is released, but nothing uses it")
        hard[index] -= 1

    def pin(self, index: int) -> None:
        """Makes a group resident and pins it softly, unless it is: it stays for as long as there is room."""
        pins = self.pins
        if index in pins.soft:
            self.trace.record(index)
            return
        self.use(index)
        pins.hard[index] -= 1
        pins.soft.add(index)

    def unpin_all(self) -> None:
        """Nothing is in use (the start of a pass, or after an exception)."""
        self.pins.clear()

    def grown(self) -> None:
        """Groups were added, or have other homes."""
        self.pins.grow(len(self.groups))
        self._measure()

    def is_pinned(self, index: int) -> bool:
        return self.pins.holds(index)

    def invalidate(self, index: int) -> None:
        """The shards changed: what was gathered of this group is out of date."""
        group = self.groups[index]
        group.outdated()
        if group.residence is not Residence.ABSENT and not group.updated_in_place:
            self._drop(index)

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
        (group.begin_near if near else group.begin_gather)()
        if group.fetch_bytes:
            self._fetched.add(index)  # not before: what is dropped for its memory, where the card has none, is not it
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
            if not self._drop_for(self._fetch_bytes[index] + group.transit_bytes, sooner_than=distance):
                return
            emptied = self.emptied
            try:
                self.agreement.gather(index, group.near)
            except torch.OutOfMemoryError:
                if self.alone:
                    return  # it is not needed yet
                raise
            self._ahead[index] = group.gathered_numel
            if self.emptied != emptied:
                return  # the card is full: what that has dropped would be fetched again, and drop this one

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
                self.reduced.append(index)
            if departed:
                self.gradients[index].await_departure()

    def end_pieces(self) -> None:
        """Backward has ended: what was reduced of a gradient is all there is of it."""
        self.reduced += sorted(index for index in self._pieces if index not in self._reducing)
        self._pieces.clear()

    def take_reduced(self) -> list[int]:
        """The groups whose sum has left for where its update runs since this was last asked. Only noted here, for the engine to
        hand out: an optimizer that is told may wait for an update, and nobody who makes room should.

        Not those of which more is on its way: it counts as held already, and is not there. They come when it is."""
        found, self.reduced = self.reduced, []
        return [index for index in dict.fromkeys(found) if index not in self._reducing]

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
            self.reduced.clear()
            for gradient in self.gradients:
                with suppress(DiskError):
                    gradient.clear()

    def join_gather(self, index: int, near: bool = False) -> None:
        """Takes part in a gather, whether this rank needs it or another one. ``near``: inside the node."""
        with self._taking_part():
            group, hard = self.groups[index], self.pins.hard
            hard[index] += 1  # where the card has no memory for what it takes, it is not what is dropped for that
            try:
                if group.residence is Residence.ABSENT and (group.near or not near):
                    self._begin_gather(index, near)
                else:
                    (group.serve_near if near else group.serve_gather)()
            finally:
                hard[index] -= 1

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

    def pending_in(self, index: int) -> set[int]:
        """A group's parameters with a gradient on this rank that was not reduced yet."""
        return self.gradients[index].pending

    def know_pending(self, index: int, anywhere: set[int]) -> None:
        """The same of all ranks together."""
        gradient = self.gradients[index]
        gradient.elsewhere.update(anywhere - gradient.pending - gradient.present)

    def correct_present(self, index: int, wrong: set[int], missing: set[int]) -> None:
        """It turned out which parameters do have a gradient on some rank."""
        gradient = self.gradients[index]
        if gradient.held or index in self._reducing:  # otherwise it was forgotten meanwhile
            gradient.present |= missing
        gradient.present -= wrong
        if not gradient.present and not gradient.pending and not gradient.elsewhere:
            gradient.clear()
