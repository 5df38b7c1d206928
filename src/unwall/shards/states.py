"""What states a group has: each one's name, dtype, size and initial value, as data.

Everything that counts, allocates, moves or saves states reads these specifications; only an optimizer's own arithmetic
(``optim/rule.py``) knows what they mean.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch

GROUP = 0
"""The owner of what belongs to the group itself, whatever updates it. Optimizers count from 1."""


class StateKey(NamedTuple):
    """Which state of a group: two optimizers over the same group have states of the same name."""

    owner: int
    """``GROUP``, or the optimizer's number."""
    name: str


PARAM, GRAD = StateKey(GROUP, "param"), StateKey(GROUP, "grad")
"""Parameters and gradient, where an update names all that it reads and writes. They are no entries of ``Group.states``."""


AVERAGE = "ema"
"""The name of an average. It lies where optimizer states do, and updates do not touch it."""


@dataclass(frozen=True)
class StateSpec:
    """One state: as many elements as the group's owned run, all of them ``initial`` when it comes into being."""

    name: str
    dtype: torch.dtype
    initial: float = 0.0

    @property
    def bytes_per_element(self) -> int:
        return self.dtype.itemsize

    def nbytes(self, numel: int) -> int:
        """What the state of ``numel`` elements takes."""
        return numel * self.bytes_per_element

    def key(self, owner: int = GROUP) -> StateKey:
        return StateKey(owner, self.name)


REMAINDER = StateSpec("remainder", torch.int16)
"""The lower half of a split master, beside bf16 parameters."""
MASTER = StateSpec("master", torch.float32)
"""A separate master, beside fp16 parameters."""
LEAN_REMAINDER = StateSpec(REMAINDER.name, torch.int8)
"""The same of a master of 24 bits: the upper byte of the remainder. It takes the place of the other."""
LEAN_MOMENTS = StateSpec("moments", torch.int16)
"""Both moments of AdamW in a byte each. See [Note: lean format] in native/cpp/lean_impl.hpp."""


def master_specs(dtype: torch.dtype, lean: bool = False) -> tuple[StateSpec, ...]:
    """What the master of parameters in a compute dtype takes beyond the parameters themselves. ``lean``: with lean states,
    which are there for bf16 alone."""
    rest = LEAN_REMAINDER if lean else REMAINDER
    return {torch.bfloat16: (rest,), torch.float16: (MASTER,)}.get(dtype, ())


def moment_dtype(dtype: torch.dtype) -> torch.dtype:
    """What an optimizer keeps beside parameters of a compute dtype: the dtype of their master."""
    return torch.float64 if dtype is torch.float64 else torch.float32


def adamw_specs(dtype: torch.dtype, lean: bool = False) -> tuple[StateSpec, ...]:
    """AdamW's own states. What fits is judged by them at ``shard``, when nobody knows the optimizer yet."""
    if lean and dtype is torch.bfloat16:
        return (LEAN_MOMENTS,)
    kept = moment_dtype(dtype)
    return StateSpec("exp_avg", kept), StateSpec("exp_avg_sq", kept)


def bytes_per_element(specs: Iterable[StateSpec]) -> int:
    """What several states take together, for each element."""
    return sum(spec.bytes_per_element for spec in specs)


def update_bytes(dtype: torch.dtype, specs: Iterable[StateSpec] | None = None, grad_dtype: torch.dtype | None = None) -> int:
    """Memory traffic of one element's update: all states are read and written, the gradient is read. Parameters beside a
    separate master are only written. ``specs``: the optimizer's states, AdamW's unless given."""
    master = master_specs(dtype)
    kept = bytes_per_element((*master, *(adamw_specs(dtype) if specs is None else specs)))
    params = dtype.itemsize * (1 if MASTER in master else 2)
    return 2 * kept + params + (grad_dtype or dtype).itemsize
