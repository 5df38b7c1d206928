"""Memory of the accelerator that is apart from all other: a pool of its own in torch's allocator (``Plan(arenas=True)``).

[Note: arenas]
torch's allocator cuts the segments that it has of the card into blocks, for whoever asks next. A gathered group that stays for
many steps in the middle of a segment keeps the rest of it too small for the activations of a longer sample: there is memory
enough, and no piece of it is large enough. So what lives long is taken from pools of its own. One is for states, groups and
gradients, which have few sizes, the same in each step; one for the inputs of recomputed blocks, all of which are gone after a
backward (input_stack.py). What is left to the rest of the program is whole again when a step ends.

A pool grows to what it is used for at most, and keeps that. Where the card has nothing else left torch lets others have what is
free in it (``use_on_oom``). Where that is not enough the pool is replaced by a new one: what is free of the old one goes back
to the card with the next ``empty_cache``, and so does the rest once it is free.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Arena:
    """One pool. See [Note: arenas]. Nothing else is touched: a thread that takes memory here is alone in it meanwhile."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._pool: torch.cuda.MemPool | None = None

    @contextmanager
    def taking(self) -> Iterator[None]:
        """Memory that this thread takes inside comes from here."""
        if self._pool is None:
            self._pool = self._new_pool()
        with torch.cuda.use_mem_pool(self._pool, self.device):
            yield

    def _new_pool(self) -> torch.cuda.MemPool:
        with torch.cuda.device(self.device):
            return torch.cuda.MemPool(use_on_oom=True)

    def renew(self) -> None:
        """What is free here can go back to the card."""
        self._pool = None


def arena_on(device: torch.device, wanted: bool) -> Arena | None:
    """None without an accelerator: memory there is the operating system's, which puts pages together as it likes."""
    return Arena(device) if wanted and device.type == "cuda" else None
