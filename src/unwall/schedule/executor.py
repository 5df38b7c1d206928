"""Acts on the schedule: fetches what is used, works ahead, drops what is needed last, agrees with the other ranks."""

from collections import deque
from collections.abc import Callable, Sequence

from unwall.schedule.agreement import Agreement
from unwall.schedule.lane import ComputeLane
from unwall.schedule.residency import Held, choose_drops, next_missing
from unwall.schedule.trace import Trace
from unwall.shards.collectives import Ranks
from unwall.shards.control import pack_bits
from unwall.shards.gradients import Gradient
from unwall.shards.group import Group, Residence
from unwall.tiers.ledger import BudgetError
from unwall.tiers.tiers import Tiers

LOOK_AHEAD = 2
"""Groups that may be on their way at once: enough to keep a link busy, few enough to bound memory."""
REDUCES_IN_FLIGHT = 2
"""Gradients that may be on their way over the ranks at once (each holds a flat buffer)."""


class Executor:
    """Keeps the groups that are in use on the device, within its budget.

    A group is pinned while anything may read it; pins are counted. Everything else stays for as long as there is room.
    """

    def __init__(self, groups: Sequence[Group], gradients: Sequence[Gradient], tiers: Tiers, ranks: Ranks) -> None:
        self.groups = groups
        self.gradients = gradients
        self.trace = Trace()
        self.gathered_elements = 0
        self.reduced_elements = 0
        self.lane = ComputeLane(tiers.links)
        self._device = tiers.device
        self._ranks = ranks
        self._pins = [0] * len(groups)
        self._current: int | None = None
        self._reducing: deque[int] = deque()
        self.on_landed: Callable[[int], None] = lambda _: None
        """Called with a group when the sum of its gradient is on its way to where the update runs."""
        self.agreement = Agreement(ranks, [group.name for group in groups], self, tiers.device.device)

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
        in_place = group.flat_is_home and group.own_numel == group.layout.padded_numel
        if group.residence is not Residence.ABSENT and not in_place:
            group.drop()

    def make_room(self, nbytes: int, label: str) -> None:
        """Drops groups until ``nbytes`` fit into the device budget. BudgetError when what is in use does not allow it."""
        for finish in (False, True):
            if finish:
                self.finish_reduces()  # gives the flat gradients back that are on their way
            free = self._device.ledger.free_bytes
            if free is None or nbytes <= free:
                return
            drops = choose_drops(self._held(), self.trace.next_use(), nbytes - free)
            if drops is not None:
                for index in drops:
                    self.groups[index].drop()
                return
        ledger = self._device.ledger
        raise BudgetError("device", nbytes, ledger.live_bytes, ledger.budget_bytes or 0, label)

    def _held(self) -> list[Held]:
        return [
            Held(index, group.fetch_bytes, self._pins[index] > 0 or index == self._current)
            for index, group in enumerate(self.groups)
            if group.residence is not Residence.ABSENT
        ]

    def _make_resident(self, index: int) -> None:
        group = self.groups[index]
        if group.residence is Residence.ABSENT:
            self.agreement.gather(index)
        if group.residence is Residence.ARRIVING:
            group.finish_gather()

    def _begin_gather(self, index: int) -> None:
        group = self.groups[index]
        group.finish_update()
        self.make_room(group.fetch_bytes, f"parameters of {group.name}")
        group.begin_gather()
        self.gathered_elements += group.layout.padded_numel if self._ranks.size > 1 else 0

    def _work_ahead(self) -> None:
        """Starts fetching the next missing groups, where that pushes out nothing that is needed sooner."""
        if not self.trace.known:
            return
        while True:
            present = {index for index, group in enumerate(self.groups) if group.residence is not Residence.ABSENT}
            found = next_missing(self.trace.upcoming(), present, LOOK_AHEAD)
            if found is None:
                return
            index, distance = found
            if not self.agreement.may_gather_ahead(index):
                return
            update = self.groups[index].update
            if update is not None and not update.done():
                return  # never wait for what is not needed yet: compute that could be queued meanwhile would wait, too
            free = self._device.ledger.free_bytes
            needed = 0 if free is None else self.groups[index].fetch_bytes - free
            drops = choose_drops(self._held(), self.trace.next_use(), needed, sooner_than=distance)
            if drops is None:
                return
            for drop in drops:
                self.groups[drop].drop()
            self.agreement.gather(index)

    # -- gradients ----------------------------------------------------------------------------------------------------

    def reduce(self, index: int) -> None:
        """Sums a group's gradient over the ranks (in the background) and remembers which parameters have one."""
        gradient = self.gradients[index]
        if self._ranks.size == 1:
            self.finish_reduces(leave=REDUCES_IN_FLIGHT - 1)
            gradient.begin_reduce(gradient.pending)
            self._reducing.append(index)
            if self.groups[index].home.tier == "device":
                self.finish_reduces()
            return
        bits = pack_bits(sorted(gradient.pending), len(self.groups[index].params))
        self.agreement.reduce(index, bits)

    def finish_reduces(self, leave: int = 0, notify: bool = True, departed: bool = True) -> None:
        """Waits for reductions under way, the oldest first, until only ``leave`` are left.

        ``departed``: what leaves the device is waited for until it has left. Otherwise the host, which runs ahead of the
        device, would have it hold the gradients of the whole model on their way."""
        while len(self._reducing) > leave:
            index = self._reducing.popleft()
            self.gradients[index].finish_reduce()
            if notify:
                self.on_landed(index)
            if departed:
                self.gradients[index].await_departure()

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
        self.reduced_elements += self.groups[index].layout.padded_numel

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
