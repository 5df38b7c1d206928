"""Module calls: running (on the stack), and finished with a backward that may come."""

from torch import nn


class Frame:
    """A module call on the stack, and the groups it reads."""

    __slots__ = ("groups", "module", "slots")

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.groups: list[int] = []
        self.slots: set[tuple[int, int]] = set()
        """Trainable parameters it reads, as group and slot."""


class Call:
    """A finished forward call whose backward may come."""

    __slots__ = ("frozen", "groups", "open_nodes", "slots", "started", "task")

    def __init__(self, groups: tuple[int, ...], frozen: tuple[int, ...], slots: set[tuple[int, int]]) -> None:
        self.groups = groups
        self.slots = slots
        self.task = -1
        self.frozen = frozen
        self.open_nodes = 0
        """Boundary nodes that have not run yet; negative: unknown, wait for the end of the pass."""
        self.started = False
