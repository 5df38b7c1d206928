"""What one rank computes between two steps."""

from dataclasses import dataclass
from typing import Literal, get_args

from unwall.planner.formulas import HALF_BYTES

Keeping = Literal["keep", "auto", "recompute", "host"]
"""What happens to activations: all kept, decided for each block, only each block's input kept, or that one on the host."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What one rank computes between two steps."""

    batch: int = 1
    """Samples per forward and backward."""
    seq: int = 1024
    """Tokens per sample."""
    passes: int = 1
    """Forwards and backwards before a step: their gradients add up."""
    activations: Keeping = "recompute"
    sequence_tiles: int = 1
    """In how many parts of the sequence MLPs run, each computed again in backward."""
    item_bytes: int = HALF_BYTES
    """Of one number that is kept for backward: the compute dtype's."""
    clip: bool = True
    """Gradients are clipped: their norm is needed before the first update. Without clipping, states on the host are updated
    while backward runs, as far as spare host memory goes (``optim/early.py``)."""
    update_in_backward: bool = False
    """AdamW's promise of that name: all states on host and disk are updated while backward runs, in place."""
    journal: bool = True
    """Where spare host memory does not hold a second place, it may hold a journal. False: ``AdamW(speculate="shadows")``."""

    def __post_init__(self) -> None:
        for name in ("batch", "seq", "passes", "sequence_tiles", "item_bytes"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be a whole number above 0, got {value!r}")
        if self.update_in_backward and (self.clip or self.passes > 1):
            raise ValueError("update_in_backward goes with one pass per step, and without clipping")
        check_keeping(self.activations)

    @property
    def tokens(self) -> int:
        """Of one step, on one rank."""
        return self.batch * self.seq * self.passes


def check_keeping(activations: str) -> None:
    """ValueError for a choice that the planner does not know."""
    known = get_args(Keeping)
    if activations not in known:
        raise ValueError(f"activations is {', '.join(known[:-1])} or {known[-1]}, got {activations!r}")
