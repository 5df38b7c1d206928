"""Passes that end where no hook of ours sees it: the thread that watches does, and tells the other ranks.

[Note: unseen ends]
An exception in the user's part of a backward, and a Ctrl-C in a forward or a backward, end the pass without any hook or
callback being called. The other ranks wait in a collective, and would until this rank uses the model again. But what a pass
began with can be asked whether it is over ([Note: turns] in runtime/turns.py). So the thread that looks into the store twice a
second (shards/watch.py) also asks that, where a pass has begun and nobody has said that it has ended. It costs the hooks next
to nothing.

What it cannot see: an exception between a forward and its backward (in a loss function, say), because nothing of ours has begun
there, and this rank may yet come. If it does not, but runs another batch, that is a DivergedError on every rank.
"""

import sys
import traceback
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from unwall.runtime.backward import Backward
from unwall.runtime.forward import Forward
from unwall.schedule.agreement import Agreement


class Onlooker:
    """Looks at one model's passes on this rank. See [Note: unseen ends]."""

    def __init__(self, forward: Forward, backward: Backward, agreement: Agreement, device: torch.device) -> None:
        self._forward = forward
        self._backward = backward
        self._agreement = agreement
        self._device = device

    def look(self) -> None:
        """On the thread that watches."""
        if not self._forward.on_stack and not self._backward.running:
            return
        with _on(self._device):
            self._agreement.fail_aside(f"its backward ended with {_error()}", True, self._backward.ended_unseen)
            self._agreement.fail_aside(f"its forward ended with {_error()}", False, self._forward.ended_unseen)


def _error() -> str:
    """What some thread of this process handles just now, if any does: most likely what ended the pass."""
    handled: list[Any] = list(sys._current_exceptions().values())
    errors = [entry[1] if isinstance(entry, tuple) else entry for entry in handled]  # a tuple before Python 3.12
    found = next((error for error in errors if error is not None), None)
    return "an exception or an interrupt" if found is None else traceback.format_exception_only(found)[-1].strip()


def _on(device: torch.device) -> AbstractContextManager[Any]:
    """Collectives that this thread begins are of this rank's device."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
