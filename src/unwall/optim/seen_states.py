"""An optimizer's states as everyone else sees them: one tensor per name, an element for each of the parameter's.

State dicts, ``optimizer.states(param)`` and checkpoints read and write states here. Mostly they are what a rule keeps. Lean
states are kept in another form, and seen as ``exp_avg`` and ``exp_avg_sq`` in fp32, from which the same bytes come back
([Note: lean roundtrip] in native/cpp/lean_impl.hpp). So nothing outside depends on the form: what was saved from lean states
can be loaded into exact ones, and the other way round.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from unwall.optim.lean_format import read_moment, write_moment
from unwall.optim.own_states import OwnStates
from unwall.optim.rule import UpdateRule
from unwall.shards.group import Group
from unwall.shards.states import LEAN_MOMENTS, StateSpec, adamw_specs
from unwall.shards.store import Store


@dataclass(frozen=True)
class SeenState:
    """One state of a group's owned run."""

    spec: StateSpec
    """As it is seen."""
    store: Store
    coded: bool
    """The store keeps it in another form, together with others."""

    def read(self) -> torch.Tensor:
        """The owned run. It must not be changed."""
        kept = self.store.tensor(write=False)
        return self.decode(kept) if self.coded else kept

    def change(self, put: Callable[[torch.Tensor], None]) -> None:
        """Lets ``put`` write to the owned run."""
        kept = self.store.tensor()
        if not self.coded:
            put(kept)
            return
        values = self.decode(kept)
        put(values)
        self.encode(kept, values)

    def decode(self, kept: torch.Tensor) -> torch.Tensor:
        """A part of what the store keeps, from the beginning of a block of 64 elements on, as it is seen."""
        return read_moment(kept, self.spec.name)

    def encode(self, kept: torch.Tensor, values: torch.Tensor) -> None:
        """The inverse: changes that part of what the store keeps."""
        write_moment(kept, self.spec.name, values)


def seen_specs(rule: UpdateRule, group: Group) -> tuple[StateSpec, ...]:
    """The states that a rule keeps of a group, as they are seen, in the order in which they are to be set."""
    specs = rule.specs(group)
    return _lean_seen() if _is_lean(specs) else specs


def seen_states(rule: UpdateRule, own: OwnStates, group: Group) -> list[SeenState]:
    """The same where they live. They come into being at first use."""
    specs = rule.specs(group)
    stores = list(own.stores(group, specs).values())
    if _is_lean(specs):
        return [SeenState(spec, stores[0], coded=True) for spec in _lean_seen()]
    return [SeenState(spec, store, coded=False) for spec, store in zip(specs, stores, strict=True)]


def _is_lean(specs: Sequence[StateSpec]) -> bool:
    return LEAN_MOMENTS in specs


def _lean_seen() -> tuple[StateSpec, ...]:
    """``exp_avg`` is kept in proportion to ``exp_avg_sq``, which therefore comes first."""
    return tuple(reversed(adamw_specs(torch.bfloat16)))
