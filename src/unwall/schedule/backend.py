"""What the executor drives, as protocols.

[Note: two backends]
The engine's groups and gradients (``shards/``) move bytes. The planner's (``planner/simulation/``) put work into the queues of
a virtual clock. Both are driven by the same executor over a ledger of the device, so what is predicted is what is decided.
"""

from array import array
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol

import torch

from unwall.shards.group import Residence


class GroupBackend(Protocol):
    """Parameters that come to the device and go. See [Note: residence] in shards/group.py."""

    @property
    def name(self) -> str: ...

    @property
    def residence(self) -> Residence: ...

    @property
    def transit_bytes(self) -> int:
        """Device memory that a fetch takes beside ``fetch_bytes`` until it has arrived."""

    @property
    def fetch_bytes(self) -> int:
        """Device memory that a fetch takes. It does not change; 0: dropping the group gives nothing back."""

    @property
    def gathered_numel(self) -> int:
        """Elements of the whole group."""

    @property
    def param_count(self) -> int: ...

    @property
    def updating(self) -> bool:
        """An update is under way that a fetch would have to wait for."""

    @property
    def undecided(self) -> bool:
        """An update may yet be taken back, and a fetch would do so."""

    @property
    def updated_in_place(self) -> bool:
        """The update writes what was gathered: it never is out of date."""

    @property
    def near(self) -> bool:
        """A gather inside the node brings it."""

    def outdated(self) -> None:
        """Its parameters change: what was kept of them elsewhere does not count any more."""

    def begin_gather(self) -> None:
        """ABSENT to ARRIVING, after an update that is under way."""

    def begin_near(self) -> None:
        """The same from the ranks of the node."""

    def serve_gather(self) -> None:
        """Takes part in a gather that another rank needs."""

    def serve_near(self) -> None:
        """The same of a gather inside the node."""

    def finish_gather(self) -> None:
        """ARRIVING to RESIDENT."""

    def drop(self) -> None:
        """To ABSENT."""


class GradientBackend(Protocol):
    """The gradient of a group on its way over the ranks."""

    @property
    def pending(self) -> set[int]:
        """Parameters with a gradient on this rank that was not reduced yet."""

    @property
    def present(self) -> set[int]:
        """Parameters that have a gradient on some rank, reduced, since the last step."""

    @present.setter
    def present(self, slots: set[int]) -> None: ...

    @property
    def elsewhere(self) -> set[int]:
        """Parameters with a gradient that only other ranks have, and that was not reduced yet."""

    @property
    def held(self) -> bool:
        """Whether there is a sum."""

    @property
    def flat_bytes(self) -> int:
        """Device memory that a pass over this group's backward takes from now on."""

    @property
    def reduce_bytes(self) -> int:
        """Device memory that a reduction takes at most, with nothing of it there yet. It does not change."""

    @property
    def leaves(self) -> bool:
        """The sum goes to another tier, where the update runs."""

    def begin_reduce(self, present: set[int], contribute: bool = True) -> None:
        """Starts the sum over ranks of the parameters in ``present``."""

    def finish_reduce(self) -> None:
        """Waits for the sum, which then is on its way to where the update runs."""

    def await_departure(self) -> None:
        """Waits until a sum that leaves has left the device."""

    def clear(self) -> None:
        """Forgets every gradient."""


class Acts(Protocol):
    """What an agreement may ask of the executor."""

    def join_gather(self, index: int, near: bool = False) -> None: ...

    def join_reduce(self, index: int, present: set[int], contribute: bool) -> None: ...

    def present_in(self, index: int) -> set[int]:
        """A group's parameters that have a gradient on some rank."""

    def correct_present(self, index: int, wrong: set[int], missing: set[int]) -> None: ...

    def pending_in(self, index: int) -> set[int]:
        """A group's parameters with a gradient on this rank that was not reduced yet."""

    def know_pending(self, index: int, anywhere: set[int]) -> None:
        """The same of all ranks together."""

    def abandon(self, spoilt: bool) -> None:
        """A pass failed on some rank. ``spoilt``: the gradients since the last step are not to be used."""


class AgreementBackend(Protocol):
    """Which collective comes next, as all ranks agree. See [Note: agreement] in schedule/agreement.py."""

    def gather(self, index: int, near: bool = False) -> None: ...

    def may_gather_ahead(self, index: int, near: bool = False) -> bool: ...

    def reduce(self, index: int, bits: tuple[int, ...]) -> None: ...

    def sum(self, values: torch.Tensor) -> torch.Tensor: ...

    def begin_pass(self, grad: bool) -> None: ...

    def end_forward(self, grad: bool, sync: bool, steady: bool) -> None: ...

    def end_backward(self, sync: bool, steady: bool, pending: bool) -> None: ...

    def end_step(self, steady: bool, meet: bool = False) -> None: ...

    def together(self, what: str) -> None: ...

    def note(self, what: str) -> None: ...

    def prepared(self, what: str) -> AbstractContextManager[None]: ...

    def fail(self, error: BaseException | str, spoilt: bool | None = None) -> None: ...

    def fail_for_good(self, error: BaseException, why: str) -> bool: ...

    def fail_alone(self, error: BaseException, why: str = "") -> bool: ...

    def say(self, values: "array[float]", names: Callable[[], list[str]], advice: str) -> None: ...

    def rejoin(self) -> None: ...

    @property
    def failed(self) -> bool:
        """Whether the others were told that this rank cannot go on with what it was at."""

    @property
    def settled(self) -> bool:
        """No rank keeps gradients that were not reduced. The same answer on every rank."""


class Lane(Protocol):
    """Watches what is computed between one group and the next."""

    @property
    def watching(self) -> bool:
        """Whether anybody looks."""

    def leave(self) -> None:
        """A group is about to be waited for."""

    def enter(self, label: str) -> None:
        """It is there."""
