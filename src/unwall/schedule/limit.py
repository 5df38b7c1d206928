"""How much of the card groups may take where the plan does not say. Pure decisions over what a probe reads.

[Note: what is left of the card]
Without ``device_bytes`` a group that was fetched stays for as long as there is room, and how much room there is depends on what
is not ours: activations, and whatever else the process allocates. So that is measured. At each use of a group the probe says
what is allocated; what the ledger does not know of is others'. What they hold when a pass begins is theirs, and the rest of the
card is shared: the most that the last pass of the same kind took of it, and a margin, is left free, what remains is the limit.
The first pass knows nothing and holds only what it needs, and what it fetches ahead. Where a pass holds more than the last one
did at the same place (a larger batch, longer samples), the limit goes down in proportion, at once. After an out-of-memory,
whoever met it, nothing is known any more, and the margin doubles.

Between two uses others may hold more than at either (the loss and its gradient). The allocator's peak shows that, but only
where it is the highest so far: later passes stay below it. So what was once seen is taken to be there in each pass of that
kind, on top of what others hold at the uses themselves.

The limit only says what to drop: nothing is refused because of it.
"""

from collections.abc import Callable, Hashable
from typing import NamedTuple, Protocol

MARGIN_SHARE = 1 / 16
"""Of what is shared: what is lost between blocks, and what operations take and give back between two uses."""
MOST_MARGIN_SHARE = 1 / 4
STEPS = 64
"""The limit is a multiple of so small a part of the card, so that ranks whose numbers differ a little decide alike."""
GROWTH = 1.02
"""A pass that holds more than this times what the last one did is a larger one."""


class Allocated(NamedTuple):
    """What the allocator says."""

    reserved_bytes: int
    """What it has of the card."""
    allocated_bytes: int
    """What of that is in use."""
    peak_bytes: int
    """The most that was in use at once."""
    failures: int
    """How often there was not enough."""


class Probe(Protocol):
    """Reads a card. Cheap enough for each use of a group."""

    def free_bytes(self) -> int:
        """What nobody has of the card."""

    def allocated(self) -> Allocated: ...


def limit_of(shared_bytes: int, others_bytes: int | None, margin_share: float, floor_bytes: int) -> int:
    """What groups, gradients and states may take of what a pass and they share.

    ``others_bytes``: what must be left to others, None where it is not known."""
    if others_bytes is None:
        return floor_bytes
    step = max(1, shared_bytes // STEPS)
    left = shared_bytes - others_bytes - int(shared_bytes * margin_share)
    return max(floor_bytes, left // step * step)


class Limit:
    """See [Note: what is left of the card].

    ``ours`` gives the ledger's live bytes. ``floor_bytes``: what is needed in any case. ``counted``: what others hold
    is counted and not measured, so that nothing is lost between blocks and the first pass need not be careful.
    """

    def __init__(self, probe: Probe, ours: Callable[[], int], floor_bytes: int, *, counted: bool = False) -> None:
        self.nbytes = floor_bytes
        self._probe = probe
        self._ours = ours
        self._floor = floor_bytes
        self._counted = counted
        self._margin_share = 0.0 if counted else MARGIN_SHARE
        self._known: dict[Hashable, list[int]] = {}
        """By kind of pass: what others held at each use, beyond what they had at its beginning."""
        self._between: dict[Hashable, int] = {}
        """By kind of pass: how much more others held between two uses than at any of them."""
        self._at_uses: dict[Hashable, int] = {}
        """By kind of pass: what they held at the uses of the last one, at most."""
        self._most_at_uses = 0
        self._kind: Hashable = None
        self._now: list[int] = []
        self._most_now = self._most_known = 0
        self._growth = 1.0
        self._shared = self._base = 0
        self._failures = probe.allocated().failures
        self._peak = self._before = 0

    def begin(self, kind: Hashable) -> None:
        """A pass begins; the one before becomes what is known about its kind."""
        found = self._probe.allocated()
        if self._now:
            self._known[self._kind], self._at_uses[self._kind] = self._now, self._most_at_uses
            self._between[self._kind] = max(max(self._now) - self._most_at_uses, self._between.get(self._kind, 0))
        if found.failures > self._failures:
            self._known.clear()
            self._between.clear()
            self._margin_share = min(MOST_MARGIN_SHARE, 2 * self._margin_share)
        self._failures = found.failures
        self._peak, self._before = found.peak_bytes, self._ours()
        self._base = found.allocated_bytes - self._before
        self._shared = self._probe.free_bytes() + found.reserved_bytes - self._base
        self._kind, self._now, self._growth = kind, [], 1.0
        self._most_now, self._most_known = 0, max(self._known.get(kind, [0]))
        if kind in self._known:
            self._most_known = max(self._most_known, self._at_uses.get(kind, 0) + self._between[kind])
        self._most_at_uses = 0
        self._decide()

    def used(self) -> None:
        """A group is about to be used."""
        found, ours = self._probe.allocated(), self._ours()
        others = found.allocated_bytes - ours - self._base
        self._most_at_uses = max(self._most_at_uses, others)
        if found.peak_bytes > self._peak:  # since the last use, when ours was one or the other
            others = max(others, found.peak_bytes - max(ours, self._before) - self._base)
        self._peak, self._before = found.peak_bytes, ours
        known, place = self._known.get(self._kind, []), len(self._now)
        most, growth = self._most_now, self._growth
        self._most_now = others if not self._now else max(most, others)
        self._now.append(others)
        if place < len(known) and others > GROWTH * known[place] > 0:
            self._growth = max(growth, others / known[place])
        if self._most_now != most or self._growth != growth:
            self._decide()

    def _decide(self) -> None:
        known = self._counted or self._kind in self._known
        others = max(int(self._growth * self._most_known), self._most_now) if known else None
        self.nbytes = limit_of(self._shared, others, self._margin_share, self._floor)
