"""Acts on the schedule: fetches what is used, works ahead, drops what is needed last, agrees with the other ranks."""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from unwall.schedule.backend import Acts, AgreementBackend, GradientBackend, GroupBackend, Lane
from unwall.schedule.residency import Occupant, choose_drops, next_missing
from unwall.schedule.trace import Trace
from unwall.shards.control import pack_bits
from unwall.shards.group import Residence
from unwall.tiers.ledger import BudgetError, Ledger

LOOK_AHEAD = 2
"""Groups that may be on their way at once: enough to keep a link busy, few enough to bound memory."""
REDUCES_IN_FLIGHT = 2
"""Gradients that may be on their way over the ranks at once (each holds a flat buffer)."""

AnyGroup = TypeVar("AnyGroup", bound=GroupBackend)
AnyGradient = TypeVar("AnyGradient", bound=GradientBackend)


class Executor(Generic[AnyGroup, AnyGradient]):
    """Keeps the groups that are in use on the device, within the budget of its ``ledger``.

    A group is pinned while anything may read it; pins are counted. Everything else stays for as long as there is room.
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
        self._present = _Present(groups)
        self._fetched: set[int] = set()  # that take memory to be here; some may have been dropped since
        self._pins = [0] * len(groups)
        self._current: int | None = None
        self._reducing: deque[int] = deque()
        self._reduced: list[int] = []
        self.agreement = make_agreement(self)

    # -- parameters ---------------------------------------------------------------------------------------------------

    def use(self, index: int) -> None:
        """Makes a group resident and pins it; then works ahead. Raises, and pins nothing, when it cannot be fetched."""
        new = self.trace.record(index)
        self._current = index
        self._pins[index] += 1
        try:
            if new:
                self.lane.leave()
            self._make_resident(index)
            if new:
                self.lane.enter(self.groups[index].name)
                self._work_ahead()
        except BaseException:
            self._pins[index] -= 1
            raise

    def release(self, index: int) -> None:
        """Takes one pin back."""
        if self._pins[index] == 0:
            raise RuntimeError(f"group {self.groups[index].name} is released, but nothing uses it")
        self._pins[index] -= 1

    def unpin_all(self) -> None:
        """Nothing is in use (the start of a pass, or after an exception)."""
        self._pins = [0] * len(self.groups)
        self._current = None

    def is_pinned(self, index: int) -> bool:
        return self._pins[index] > 0

    def invalidate(self, index: int) -> None:
        """The shards changed: what was gathered of this group is out of date."""
        group = self.groups[index]
        if group.residence is not Residence.ABSENT and not group.updated_in_place:
            group.drop()

    def make_room(self, nbytes: int, label: str) -> None:
        """Drops groups until ``nbytes`` fit into the device budget. BudgetError when what is in use does not allow it."""
        if self._drop_for(nbytes):
            return
        self.finish_reduces()  # gives the flat gradients back that are on their way
        if not self._drop_for(nbytes):
            ledger = self._ledger
            raise BudgetError("device", nbytes, ledger.live_bytes, ledger.budget_bytes or 0, label)

    def _drop_for(self, nbytes: int, sooner_than: int | None = None) -> bool:
        """Drops what is needed last, as far as ``nbytes`` need it. False, and nothing is dropped, where that is not enough.

        ``sooner_than``: what is needed at this distance or sooner stays."""
        free = self._ledger.free_bytes
        if free is None or nbytes <= free:
            return True
        drops = choose_drops(self._occupants(), self.trace.next_use(), nbytes - free, sooner_than)
        for index in drops or ():
            self.groups[index].drop()
        return drops is not None

    def _occupants(self) -> list[Occupant]:
        self._fetched = {index for index in self._fetched if index in self._present}
        return [
            Occupant(index, self.groups[index].fetch_bytes, self._pins[index] > 0 or index == self._current)
            for index in self._fetched
        ]

    def _make_resident(self, index: int) -> None:
        group = self.groups[index]
        if group.residence is Residence.ABSENT:
            self.agreement.gather(index)
        if group.residence is Residence.ARRIVING:
            group.finish_gather()

    def _begin_gather(self, index: int) -> None:
        group = self.groups[index]
        self.make_room(group.fetch_bytes, f"parameters of {group.name}")
        if group.fetch_bytes:
            self._fetched.add(index)
        group.begin_gather()
        self.gathered_elements += group.gathered_numel if self._ranks > 1 else 0

    def _work_ahead(self) -> None:
        """Starts fetching the next missing groups, where that pushes out nothing that is needed sooner."""
        if not self.trace.known:
            return
        while True:
            found = next_missing(self.trace.upcoming(), self._present, LOOK_AHEAD)
            if found is None:
                return
            index, distance = found
            group = self.groups[index]
            if not self.agreement.may_gather_ahead(index):
                return
            if group.updating:
                return  # never wait for what is not needed yet: compute that could be queued meanwhile would wait, too
            if not self._drop_for(group.fetch_bytes, sooner_than=distance):
                return
            self.agreement.gather(index)

    # -- gradients ----------------------------------------------------------------------------------------------------

    def reduce(self, index: int) -> None:
        """Sums a group's gradient over the ranks (in the background) and remembers which parameters have one."""
        gradient = self.gradients[index]
        if self._ranks == 1:
            self.finish_reduces(leave=REDUCES_IN_FLIGHT - 1)
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
            self._reduced.append(index)
            if departed:
                self.gradients[index].await_departure()

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

    def end_step(self) -> None:
        """Nothing is left to reduce on this rank. Returns when that is so on all of them."""
        self.agreement.end_step(self.trace.known)

    def together(self) -> None:
        """Something that all ranks must call at once. DivergedError, instead of a hang, when one of them does not."""
        self.agreement.together()

    def join_gather(self, index: int) -> None:
        """Takes part in a gather, whether this rank needs it or another one."""
        if self.groups[index].residence is Residence.ABSENT:
            self._begin_gather(index)
        else:
            self.groups[index].serve_gather()

    def join_reduce(self, index: int, present: set[int], contribute: bool) -> None:
        """Takes part in a reduction. Without ``contribute`` another rank needs it: this one adds zeros."""
        gradient = self.gradients[index]
        self.finish_reduces(leave=REDUCES_IN_FLIGHT - 1)
        self.make_room(gradient.flat_bytes, f"gradients of {self.groups[index].name}")
        gradient.begin_reduce(present, contribute=contribute)
        self._reducing.append(index)
        self.reduced_elements += self.groups[index].gathered_numel

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


class _Present:
    """The groups that are on the device or on their way to it, as a container."""

    def __init__(self, groups: Sequence[GroupBackend]) -> None:
        self._groups = groups

    def __contains__(self, index: object) -> bool:
        return isinstance(index, int) and self._groups[index].residence is not Residence.ABSENT
