"""Module calls: running (on the stack), and finished with a backward that may come."""

from torch import nn

from unwall.runtime.places import Place
from unwall.runtime.saved import Pair


class Frame:
    """A module call on the stack, and the groups it reads."""

    __slots__ = ("groups", "module", "places", "saved")

    def __init__(self, module: nn.Module, saved: Pair | None) -> None:
        self.module = module
        self.groups: list[int] = []
        self.places: set[Place] = set()
        """Trainable parameters it reads."""
        self.saved = saved
        """The hooks for saved tensors that are there for as long as it runs, if it is the outermost call."""


class Call:
    """A finished forward call whose backward may come."""

    __slots__ = ("frozen", "groups", "open_nodes", "places", "started", "task")

    def __init__(self, groups: tuple[int, ...], frozen: tuple[int, ...], places: set[Place]) -> None:
        self.groups = groups
        self.places = places
        self.task = -1
        self.frozen = frozen
        self.open_nodes = 0
        """Boundary nodes that have not run yet; negative: unknown, wait for the end of the pass."""
        self.started = False
