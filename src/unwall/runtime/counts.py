"""What is counted of a model's training, for ``unwall.stats``."""

from dataclasses import dataclass


@dataclass
class Speculated:
    """How updates that ran ahead of their step ended."""

    committed: int = 0
    in_place: int = 0
    """Of those: in place, with a journal as the way back (optim/journaled.py). The others had a second place."""
    missed: int = 0
    escaped: int = 0
    """Elements whose way back did not fit into a journal's two bytes, of updates in place."""


@dataclass(frozen=True)
class ActivationStats:
    """What became of the activations of the model's blocks in the last pass, as ``Plan(activations="auto")`` measured it."""

    kept_bytes: int = 0
    """Held on the device from forward to backward, the inputs of recomputed blocks among them."""
    moved_bytes: int = 0
    """Sent to the host, and back."""
    recomputed_bytes: int = 0
    """Computed again in backward."""
    survived: int = 0
    """Forwards of blocks that ran again after an out-of-memory, since the model was sharded."""
