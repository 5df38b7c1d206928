"""How much of the card a pass may hold.

[Note: how much there is]
Blocks may hold what the card, or ``device_bytes``, has beyond what is there in any case (what others hold when a pass begins,
and the least that states need) and beyond what a pass needs besides its blocks (the loss, temporary results, gradients). The
latter is measured: the peak of a pass, less what was there in any case and less what its blocks held by our count. Twice: up to
where backward reaches the blocks (the loss, when all blocks hold what they hold) and after that (temporary results, when one of
them is computed again). An allocator shows no peak below the highest one so far. So a pass that stays below it says only that
it needed no more than that: then what is known of the pass before counts, or an estimate. What the decision leaves is the
groups' (schedule/limit.py). So activations come first and a cache of parameters second: what is not cached is fetched while
something is computed, what is not kept is computed again.

[Note: the first pass]
Nothing is known of it but what its blocks have saved so far. A block is kept where there is room for it and for the inputs of
all blocks behind it, and for what comes then: the loss (runtime/beside.py), or the backward of a block that is recomputed,
which needs its activations and about as much again. Where there is not even room for those inputs its own goes to the host. Of
the very first block nobody knows how much it saves: that is guessed.
"""

from collections.abc import Callable, Sequence

from unwall.schedule.limit import Probe

MARGIN_SHARE = 1 / 32
"""Of the card: what is lost between blocks of memory."""
MOST_MARGIN_SHARE = 1 / 4
FIRST_SHARE = 1 / 8
"""Of the card: left free in a pass of which nothing is known, for what nobody has thought of."""
GUESS = 32
"""Times its input: what a block saves of which nothing is known. Layers of transformers save 15 to 25 times it."""


class ActivationRoom:
    """See [Note: how much there is]. ``counted``: the card is an account, and nothing but blocks is on it."""

    def __init__(self, card: Probe, ours: Callable[[], int], least_bytes: int, *, counted: bool) -> None:
        self._card = card
        self._ours = ours
        self._least = least_bytes
        self._counted = counted
        self._margin_share = 0.0 if counted else MARGIN_SHARE
        self._failures = card.allocated().failures
        self._base = self._seen_peak = self._ours_before = self._reserved = 0
        self._in_backward = False
        self._loss_others: int | None = None
        self._block_others: int | None = None
        """What others held in this pass at most, as far as it was seen: before backward came to the blocks, and otherwise."""

    def begin(self) -> None:
        """A pass begins. After an out-of-memory, whoever met it, there is less."""
        found = self._card.allocated()
        if found.failures > self._failures:
            self.failed()
        self._seen_peak, self._ours_before = found.peak_bytes, self._ours()
        self._base, self._reserved = found.allocated_bytes - self._ours_before, found.reserved_bytes
        self._in_backward, self._loss_others, self._block_others = False, None, None

    def failed(self) -> None:
        """There was not enough."""
        self._failures = self._card.allocated().failures
        self._margin_share = min(MOST_MARGIN_SHARE, 2 * max(MARGIN_SHARE, self._margin_share))

    def left_bytes(self) -> int:
        """For blocks, and for what a pass needs besides them."""
        return self._total() - self._base - self._least

    def sure_bytes(self) -> int:
        """The same at least, by what the allocator has of the card already: the card itself is not asked, which takes long."""
        return self._reserved - int(self._reserved * self._margin_share) - self._base - self._least

    def left_now_bytes(self) -> int:
        """The same in the middle of a pass of which nothing is known."""
        others = self._card.allocated().allocated_bytes - self._ours()
        return self._total() - others - self._least - (0 if self._counted else int(self._total() * FIRST_SHARE))

    def first_bytes(self, kept_bytes: Sequence[int], input_bytes: int, behind: int, beside_bytes: int) -> tuple[int, int]:
        """What must be left for a block to be kept, and for its input to stay. See [Note: the first pass].

        ``kept_bytes``: of the blocks so far; ``behind``: how many come after it, with inputs of ``input_bytes``."""
        kept = max(kept_bytes) or GUESS * input_bytes
        then = behind * input_bytes + (kept if self._counted else max(2 * kept, beside_bytes))
        return kept + then, input_bytes + then

    def sample(self) -> None:
        """A block has ended, in a pass that is measured. What it took for itself backward takes, too: that is not noted."""
        self._rose()

    def reached(self) -> None:
        """Backward comes to a block, in a pass that is measured. The first time the loss is behind it."""
        rose = self._rose()
        if not self._in_backward:
            self._in_backward = True
            self._loss_others = rose
        else:
            self._note(rose)

    def beyond_bytes(
        self, held_bytes: int, most_bytes: int, largest_bytes: int, known: tuple[int, int] | None, beside_bytes: int
    ) -> tuple[int, int]:
        """What the pass needed besides its blocks: in their backward, and before it.

        Blocks held ``held_bytes`` when forward ended, and ``most_bytes`` while backward was at the worst of them; the largest
        is ``largest_bytes``. ``known``: the same of the pass before, None where there was none; then ``beside_bytes`` is the
        best guess of the loss, and of a block's backward that it needs about as much again as the block."""
        if self._counted:
            return 0, 0
        self._note(self._rose())
        bound = self._seen_peak - self._base - self._least
        beyond, loss = (largest_bytes, beside_bytes) if known is None else known
        in_blocks = min(bound, most_bytes + beyond) if self._block_others is None else self._block_others
        in_loss = min(bound, held_bytes + loss) if self._loss_others is None else self._loss_others
        return max(0, in_blocks - most_bytes), max(0, in_loss - held_bytes)

    def _note(self, rose: int | None) -> None:
        if rose is not None:
            self._block_others = rose if self._block_others is None else max(rose, self._block_others)

    def _rose(self) -> int | None:
        """What others held at most since this was last asked. None where the allocator shows no new peak.

        What was ours then is not known: the less of before and now, so that others' is not less than it was."""
        found, ours, before = self._card.allocated(), self._ours(), self._ours_before
        self._ours_before = ours
        if found.peak_bytes <= self._seen_peak:
            return None
        self._seen_peak = found.peak_bytes
        return found.peak_bytes - self._base - max(self._least, min(ours, before))

    def _total(self) -> int:
        total = self._card.free_bytes() + self._card.allocated().reserved_bytes
        return total - int(total * self._margin_share)
