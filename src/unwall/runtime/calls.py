"""Module calls: running (on the stack), and finished with a backward that may come."""

import os
import sys
from collections.abc import Sequence
from types import FrameType

import torch
from torch import nn

from unwall.runtime.places import Place
from unwall.runtime.saved import Pair

_DYNAMO = os.path.join("_dynamo", "eval_frame.py")


class Frame:
    """A module call on the stack, and the groups it reads."""

    __slots__ = ("__weakref__", "began", "caller", "covers", "groups", "marked", "module", "places", "saved")

    def __init__(self, module: nn.Module, saved: Pair | None, caller: FrameType | None = None) -> None:
        self.module = module
        self.caller = caller
        """The Python frame that makes it: of the outermost call, and with several ranks of each."""
        self.began: int = _next_number()
        """Of the first autograd node that it makes, if it makes any."""
        self.groups: list[int] = []
        self.marked: list[int] = []
        """Groups that stay anyway, while a time line wants to know of them."""
        self.places: set[Place] = set()
        """Trainable parameters it reads."""
        self.saved = saved
        """The hooks for saved tensors that are there for as long as it runs, if it is the outermost call."""
        self.covers = False
        """See [Note: covered calls] in runtime/covered.py."""


def is_running(frame: FrameType | None) -> bool:
    """Whether a Python frame is on the stack of this thread."""
    at: FrameType | None = sys._getframe(1)
    while at is not None and at is not frame:
        at = at.f_back
    return at is not None


def caller_of_hook() -> FrameType:
    """The call of the hook that called ``enter``. Of a compiled module's hook dynamo has a frame in between."""
    found = sys._getframe(3)
    while found.f_back is not None and found.f_code.co_filename.endswith(_DYNAMO):
        found = found.f_back
    return found


class Call:
    """A finished forward call whose backward may come."""

    __slots__ = ("began", "frozen", "groups", "marked", "places", "task")

    def __init__(
        self, groups: Sequence[int], frozen: Sequence[int], places: set[Place], marked: Sequence[int] = (), began: int = 0
    ) -> None:
        self.groups = groups
        """Those that come and go: its backward needs them here."""
        self.marked = marked
        self.places = places
        self.task = -1
        """The backward that has come to it last."""
        self.frozen = frozen
        """Groups with parameters whose gradients nobody waits for."""
        self.began = began
        """As of its ``Frame``."""


_next_number = torch.autograd._get_sequence_nr  # type: ignore[attr-defined]
"""The number that this thread's next autograd node will have."""
