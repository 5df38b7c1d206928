"""A group's gradient on its way: from autograd into the flat buffer, over the ranks, to the place where its update reads it.

[Note: gradient]
Three things happen to it, each by an object of its own. This rank's gradients are accumulated (shards/accumulate.py): ``take``
each parameter's as autograd finishes it. The ranks' are reduced (shards/reduce.py): ``begin_reduce`` when all are in. The
average lands (shards/landing.py): ``finish_reduce`` before anyone looks. Several passes before a step add up in fp32.

Where room is short, what has arrived is reduced before the rest is in. Such *pieces* of one pass have no parameter in common,
so they are put beside each other in the place, in the dtype they arrive in: no sum, no memory, the same bits.

A sum that is under way is in one of these phases, whatever earlier passes have left in the place (``Holding`` in
shards/landing.py), and whatever this rank accumulates for its own turn meanwhile:

IDLE      none is under way. No memory beyond what the accumulator and the place hold.
REDUCING  a collective is under way: what is sent and what arrives have memory on the device.
LEAVING   the average is known, and on its way to its place. That memory stays until ``finish_reduce``.
"""

import enum
from collections.abc import Callable, Set
from functools import partial
from typing import NoReturn

import torch

from unwall.shards.accumulate import Accumulator
from unwall.shards.away import place_of
from unwall.shards.collectives import Ranks
from unwall.shards.compress import Codec, travels_packed
from unwall.shards.group import Group
from unwall.shards.landing import Holding
from unwall.shards.layout import Segment
from unwall.shards.packed_reduce import PackedReducer
from unwall.shards.reduce import Reducer, Reduction
from unwall.shards.store import Store
from unwall.shards.two_hops import TwoHopReducer
from unwall.tiers.loans import Loans
from unwall.tiers.ticket import Ticket, hold_back
from unwall.tiers.tiers import Tiers


class Phase(enum.Enum):
    """See [Note: gradient]."""

    IDLE = "idle"
    REDUCING = "reducing"
    LEAVING = "leaving"


class Gradient:
    """The gradient of one group, in ``dtype`` on its way over the ranks.

    ``keep_flat``: gradients are not cut (stages 0 and 1): the flat buffer stays, and the sum goes back into it.
    ``everywhere`` (stage 0): every rank ends with the whole sum, so that every rank updates everything.
    ``mean``: the average over the ranks, otherwise their sum. ``bits``, ``feedback``: see shards/packed_reduce.py.
    ``loans``: it is not kept where it lands (``Plan(grads="transient")``), but goes through this memory.
    """

    def __init__(
        self,
        group: Group,
        tiers: Tiers,
        ranks: Ranks,
        dtype: torch.dtype,
        *,
        keep_flat: bool,
        everywhere: bool,
        mean: bool = True,
        bits: int | None = None,
        feedback: bool = False,
        loans: Loans | None = None,
    ) -> None:
        self.group = group
        self.phase = Phase.IDLE
        self.passes = 0
        """Passes that were reduced since the last step; pieces of one count once."""
        self.serial = 0
        """Counts reductions and changes: says whether a gradient is still the one that was seen before."""
        self.reductions = 0
        """Those alone: says whether a backward has brought something since."""
        self.changed = False
        """Whether someone has changed it by hand since the last step."""
        self.present: set[int] = set()
        """Parameters that have a gradient on some rank, reduced, since the last step."""
        self.elsewhere: set[int] = set()
        """Parameters with a gradient that only other ranks have, and that was not reduced yet."""
        self._forgotten: set[int] = set()
        """Parameters whose gradients are still in the place, but not wanted any more."""
        self.used: set[int] = set()
        """Parameters of which an update is under way or has ended, before ``step``."""
        self._alone = ranks.size == 1
        self.own = Accumulator(group, tiers, dtype)
        """This rank's own, before they are reduced."""
        self._reducer = Reducer(group, tiers.device, ranks, dtype, everywhere, mean)
        if bits is not None and ranks.size > 1 and travels_packed(dtype):
            codec = Codec(bits, lambda: group.pool)
            common = (group, tiers.device, ranks, dtype, everywhere, mean)
            self._reducer = PackedReducer(*common, codec=codec, feedback=feedback)
            if ranks.nodes is not None and not feedback:
                self._reducer = TwoHopReducer(*common, codec=codec, nodes=ranks.nodes)
        self._reduction: Reduction | None = None
        """What is under way. None when IDLE."""
        self._before: set[int] | None = None
        """Parameters that earlier pieces brought, if what is under way is a further piece."""
        self.transient = loans is not None
        """Whether ``let_go`` lets it go."""
        self.loans = loans
        self._new_place = partial(place_of, group, tiers, ranks, dtype, keep_flat, loans)
        self._place = self._new_place()

    def move(self) -> None:
        """The group has another home, and gradients land there from now on. Nothing is held or under way."""
        self._expect(Phase.IDLE)
        self._place = self._new_place()
        if self.loans is not None:
            self.loans.close()

    # -- this rank's gradients ----------------------------------------------------------------------------------------

    @property
    def arrived(self) -> set[int]:
        """Parameters whose gradient of the running pass is in the flat buffer and not yet reduced."""
        return self.own.arrived

    @property
    def pending(self) -> set[int]:
        """Parameters with a gradient on this rank that was not reduced yet."""
        return self.own.pending

    @property
    def known(self) -> set[int]:
        """Parameters with a gradient on some rank, reduced or not. Not to be changed."""
        own = self.own
        more = self.elsewhere or own.arrived or own.local_slots
        return self.present | self.elsewhere | own.arrived | own.local_slots if more else self.present

    @property
    def reducer(self) -> Reducer:
        """How it is summed over the ranks."""
        return self._reducer

    @property
    def local_bytes(self) -> int:
        """Device memory that ``keep_local`` needs."""
        return self.own.local_bytes

    @property
    def flat_bytes(self) -> int:
        """Device memory that a pass over this group's backward takes: the flat buffer and, over ranks, what it becomes."""
        further = self._place.growth_bytes + (0 if self._alone else self._reducer.nbytes)
        if self.own.flat is not None or self._place.flat is not None:
            return further
        sent = self._reduction is not None and self._reduction.has_flat  # it is back before the next pass takes one
        return further if sent else further + self.own.flat_bytes

    @property
    def reduce_bytes(self) -> int:
        """Device memory that a reduction takes at most, with nothing of it there yet."""
        if not any(param.requires_grad for param in self.group.params):
            return 0
        grows = self.group.own_numel * 4 if not self.leaves and self.own.dtype.itemsize < 4 else 0
        return self.own.flat_bytes + self._reducer.nbytes + grows

    def sum_bytes(self, slots: set[int]) -> int:
        """Host memory that further gradients of ``slots`` take, to be added to what is held."""
        return 0 if self.present.isdisjoint(slots) else self._place.sum_bytes

    def sum_growth_bytes(self, slots: set[int]) -> int:
        """Device memory that the same takes for good."""
        return 0 if self.present.isdisjoint(slots) else self._place.sum_growth_bytes

    def take(self, slot: int, grad: torch.Tensor) -> None:
        """Copies (or adds) one parameter's gradient into the flat buffer."""
        own = self.own
        if slot in self.used:
            self._refuse_second(slot)
        if self.phase is not Phase.IDLE or own.flat is None:
            self._fill()
        own.take(slot, grad)

    def take_in(self, slot: int, write: Callable[[torch.Tensor, bool], None]) -> None:
        """The same for a slot whose gradient is written in its place. ``write`` gets that, and whether it holds nothing yet."""
        self._fill()
        self.own.take_in(slot, write)

    def keep_local(self) -> None:
        """The end of a pass inside ``no_sync``: what arrived is added to this rank's own sum, in fp32."""
        self.finish_reduce()
        self.own.keep_local()

    def drop_pending(self, slots: set[int]) -> None:
        """Forgets gradients of some parameters that were not reduced yet."""
        self.own.drop(slots)

    def _refuse_second(self, slot: int) -> NoReturn:
        name = self.group.layout.slots[slot].name
        raise RuntimeError(
            f"a second backward before step(), or reentrant checkpoints that share a parameter: {name} gets another gradient, "
            "but update_in_backward=True has used the one before. Call step() after each backward, write use_reentrant=False, "
            "or build the optimizer without update_in_backward"
        )

    def _fill(self) -> None:
        """The flat buffer is there to be written to."""
        self.finish_reduce()  # it may still be on its way
        if not self.own.filling:
            self.own.begin(self._place.take_flat())

    # -- over the ranks, and to its place -----------------------------------------------------------------------------

    def begin_reduce(self, present: set[int], contribute: bool = True) -> None:
        """Starts the sum over ranks.

        ``present``: parameters with a gradient on any rank. A rank that only serves another's wish does not ``contribute``:
        it adds zeros and keeps what arrived for its own turn. If this raises, nothing has changed.
        """
        self.finish_reduce()
        self._clear_forgotten()
        if contribute:
            self._fill()
        self._reduction = self._reducer.begin(self.own if contribute else None)
        piece = self.held and self.present.isdisjoint(present)
        self._before = self.present.copy() if piece else None
        self.present |= present
        self.elsewhere -= present
        self.passes += not piece
        self.serial += 1
        self.reductions += 1
        self.phase = Phase.REDUCING
        if self._reducer.ranks.size == 1:
            self._leave()

    def finish_reduce(self) -> None:
        """Waits for the sum, and hands it to its place, where it counts from now on. Nothing to do when IDLE."""
        if self.phase is Phase.IDLE:
            return
        if self.phase is Phase.REDUCING:
            self._leave()
        self._expect(Phase.LEAVING)
        reduction = self._end()
        self._place.finish(reduction.incoming, reduction.release())

    def _leave(self) -> None:
        """REDUCING to LEAVING. May be called again if it fails."""
        self._expect(Phase.REDUCING)
        assert self._reduction is not None
        self._reduction.wait()
        self._place.begin(self._reduction.incoming, self._beside())
        self.phase = Phase.LEAVING

    def _beside(self) -> list[Segment] | None:
        """Where a further piece has its parts, if it only has to be put beside those before. None: it is to be added."""
        if self._before is None:
            return None
        assert self._reduction is not None
        value = self._reduction.incoming.view(self.own.dtype)
        fresh, several = [], self._reducer.ranks.size > 1
        for segment in self.group.owned_segments():
            if segment.slot not in self._before:
                fresh.append(segment)
            elif several and value.narrow(0, segment.shard_start, segment.numel).count_nonzero():
                return None  # by script: some rank sent something else than was recorded
        return fresh

    def _end(self) -> Reduction:
        """To IDLE."""
        assert self._reduction is not None
        reduction, self._reduction = self._reduction, None
        self.phase = Phase.IDLE
        return reduction

    def await_departure(self) -> None:
        """Waits until the gradient has left the device, and its memory there is free."""
        if self.landing is not None:
            hold_back(self.landing, self._reducer.device.device)

    def _expect(self, phase: Phase) -> None:
        if self.phase is not phase:
            raise RuntimeError(f"the gradient of group {self.group.name} is {self.phase.value}, expected {phase.value}")

    # -- what is held for the update ----------------------------------------------------------------------------------

    @property
    def held(self) -> bool:
        """Whether there is a reduced gradient."""
        return self._place.holding in (Holding.LANDING, Holding.LANDED, Holding.USED)

    @property
    def leaves(self) -> bool:
        """The sum leaves the device: the update runs on the host."""
        return self.group.home.tier == "host"

    def check(self) -> None:
        """Raises where the gradient should be here, but its tier did not take it."""
        if self.phase is Phase.REDUCING and self._alone and not self.held:  # its place had no room: that is tried again
            self.finish_reduce()
        self._place.check()

    @property
    def landing(self) -> Ticket | None:
        """The copy that brings the gradient, until someone has waited for it. See [Note: landed] in shards/landing.py."""
        return self._place.landing

    def await_landing(self) -> None:
        self._place.await_landing()

    @property
    def source(self) -> Store | torch.Tensor:
        """The average over ranks of the owned run, in memory or on disk. Whoever reads there waits for ``landing`` first."""
        return self._place.source

    @property
    def value(self) -> torch.Tensor:
        """The same where it is in memory."""
        source = self.source
        if isinstance(source, Store):
            raise RuntimeError(f"the gradient of group {self.group.name} is on disk: read() it, or use its source")
        return source

    def read(self) -> torch.Tensor:
        """The reduced gradient as a tensor, landed, wherever it is. Not to be changed."""
        self.check()
        self._clear_forgotten()
        return self._place.read()

    def change(self) -> torch.Tensor:
        """The same to be changed by hand: what was computed from it ahead of the step, or measured, does not count any more."""
        self.check()
        self._clear_forgotten()
        self.serial += 1
        self.changed = True
        self._place.square_sum = None
        return self._place.read(write=True)

    def hold(self, slots: set[int]) -> None:
        """Some parameters have a gradient from now on, zeros at first, as if a backward had brought it."""
        self.finish_reduce()
        self.check()
        if self.needs_memory:
            device, label = self._reducer.device, f"gradients of {self.group.name}"
            incoming = device.allocate(self.group.own_numel * self._reducer.dtype.itemsize, label)
            incoming.data.zero_()
            first = not self.held
            self._place.begin(incoming, None if first else self._segments(slots - self.present))
            self._place.finish(incoming, None)
            self.passes += first
        self._clear_forgotten()
        self.serial += 1
        self.present |= slots

    @property
    def square_sum(self) -> torch.Tensor | None:
        """Sum of squares of the part that this rank counts, measured while it passed. None: not measured, or not valid."""
        return self._place.square_sum

    @property
    def needs_memory(self) -> bool:
        """Whether nothing is in memory that zeros could be a part of."""
        return self._place.holding in (Holding.NOTHING, Holding.USED)

    def forget(self, slots: set[int]) -> None:
        """Takes out the gradients of some parameters. They count as gone at once; their memory is zeroed when the others' are
        read or added to, because an update may be reading it now."""
        self.used -= slots
        if not self.needs_memory:
            self._place.square_sum = None
            self._forgotten |= slots

    @property
    def all_used(self) -> bool:
        """Whether a further gradient is one too many."""
        return bool(self.used) and all(slot in self.used for slot, p in enumerate(self.group.params) if p.requires_grad)

    @property
    def lends(self) -> bool:
        """Whether it lies in memory that others wait for."""
        return self.phase is not Phase.REDUCING and self._place.lends

    def use(self, slots: Set[int]) -> None:
        """An update of these parameters is under way, before ``step``."""
        self.used |= slots

    def let_go(self) -> None:
        """After everyone was told of it: where it is not kept and all of it was used, its memory is free for others."""
        if self.transient and self.used and self.used >= self.present and self.phase is not Phase.REDUCING:
            self.finish_reduce()
            self._place.let_go()
            self._forgotten.clear()

    def _clear_forgotten(self) -> None:
        if not self._forgotten or not self.held:
            return
        value = self._place.rest(write=True)
        for segment in self._segments(self._forgotten):
            value[segment.shard_start : segment.shard_start + segment.numel].zero_()
        self.group.pending.staging.close()
        self._forgotten.clear()

    def _segments(self, slots: Set[int]) -> list[Segment]:
        return [segment for segment in self.group.owned_segments() if segment.slot in slots]

    def clear(self) -> None:
        """Forgets every gradient (``zero_grad``, or after the step). What is on its way runs to its end; nothing lands."""
        if self.phase is Phase.LEAVING:
            self._place.abandon()
        if self.phase is not Phase.IDLE:
            self._end().discard()
        self.present.clear()
        self.elsewhere.clear()
        self._forgotten.clear()
        self.used.clear()
        self.passes = 0
        self.changed = False
        self._place.clear()
        self.own.clear()
        self._reducer.forgotten()
