"""How much of the card a pass may hold.

[Note: how much there is]
Blocks may hold what the card, or ``device_bytes``, has beyond what is there in any case (what others hold when a pass begins,
and the least that states need) and beyond what a pass needs besides its blocks (the loss, temporary results, gradients). The
latter is measured: the peak of a pass, less what was there in any case and less what its blocks held by our count. What the
decision leaves is the groups' (schedule/limit.py). So activations come first and a cache of parameters second: what is not
cached is fetched while something is computed, what is not kept is computed again.
"""

from collections.abc import Callable

from unwall.schedule.limit import Probe

MARGIN_SHARE = 1 / 32
"""Of the card: what is lost between blocks of memory."""
MOST_MARGIN_SHARE = 1 / 4
FIRST_SHARE = 1 / 8
"""Of the card: left free in a pass of which nothing is known, for what comes after the blocks."""


class ActivationRoom:
    """See [Note: how much there is]. ``counted``: the card is an account, and nothing but blocks is on it."""

    def __init__(self, card: Probe, ours: Callable[[], int], least_bytes: int, *, counted: bool) -> None:
        self._card = card
        self._ours = ours
        self._least = least_bytes
        self._counted = counted
        self._margin_share = 0.0 if counted else MARGIN_SHARE
        self._failures = card.allocated().failures
        self._base = self._peak_before = self._most = self._most_ours = 0

    def begin(self) -> None:
        """A pass begins. After an out-of-memory, whoever met it, there is less."""
        found = self._card.allocated()
        if found.failures > self._failures:
            self.failed()
        self._base = found.allocated_bytes - self._ours()
        self._peak_before, self._most, self._most_ours = found.peak_bytes, 0, 0

    def failed(self) -> None:
        """There was not enough."""
        self._failures = self._card.allocated().failures
        self._margin_share = min(MOST_MARGIN_SHARE, 2 * max(MARGIN_SHARE, self._margin_share))

    def left_bytes(self) -> int:
        """For blocks, and for what a pass needs besides them."""
        return self._total() - self._base - self._least

    def left_now_bytes(self) -> int:
        """The same in the middle of a pass of which nothing is known."""
        others = self._card.allocated().allocated_bytes - self._ours()
        return self._total() - others - self._least - (0 if self._counted else int(self._total() * FIRST_SHARE))

    def sample(self) -> None:
        """A block has ended, in a pass that is measured."""
        self._most = max(self._most, self._card.allocated().allocated_bytes)
        self._most_ours = max(self._most_ours, self._ours())

    def beyond_bytes(self, held_bytes: int, largest_bytes: int) -> int:
        """What the pass needed besides its blocks, which held ``held_bytes`` at most, the largest ``largest_bytes``."""
        if self._counted:
            return 0
        peak = self._card.allocated().peak_bytes
        if peak <= self._peak_before:  # it is of another time: backward needs about as much again as the block that it is at
            peak = self._most + largest_bytes
        return max(0, peak - self._base - max(self._least, self._most_ours) - held_bytes)

    def _total(self) -> int:
        total = self._card.free_bytes() + self._card.allocated().reserved_bytes
        return total - int(total * self._margin_share)
