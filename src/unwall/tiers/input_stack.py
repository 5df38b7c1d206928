"""The inputs of recomputed blocks one behind the other in one piece of memory, which is sized once (``Plan(arenas=True)``).

[Note: one behind the other]
Inputs come in forward, and all of them are gone when backward has ended. So they need no allocator: one piece of memory, and a
mark up to which it is taken. The mark goes back to the start when nobody holds an input any more: whoever keeps one keeps its
``Pass``, too (a retained graph does). How much is needed is known when the first input of a pass comes: as many inputs as were
held at once before, of the size of this one. Where that is more than there is, a larger piece is taken in the place of the old
one, at a moment when little else is held: the allocator gives back what it has of the card first, and begins anew. So samples
of changing length leave no fragments: only one that is longer than all before it moves something.

What does not fit in (the first pass, more inputs than expected, another stream) is a tensor of its own in the arena.
"""

import sys
import weakref

import torch

from unwall.tiers.arena import Arena

ALIGN_BYTES = 512
"""As torch's allocator aligns."""


class Pass:
    """Is held by whoever holds an input of it."""

    __slots__ = ("__weakref__",)


class InputStack:
    """See [Note: one behind the other]."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._piece: torch.Tensor | None = None
        self._stream: object = None
        self._pass: weakref.ref[Pass] | None = None
        self._taken_bytes = 0
        self._most_inputs = 0
        """That were held at once."""
        self._refused_bytes: int | None = None
        """A piece of so many bytes could not be had."""

    @property
    def size_bytes(self) -> int:
        return 0 if self._piece is None else self._piece.nbytes

    def copy_of(self, given: torch.Tensor) -> tuple[torch.Tensor, Pass]:
        """A copy that autograd knows nothing of, and what to hold for as long as it."""
        nbytes = -(-given.nbytes // ALIGN_BYTES) * ALIGN_BYTES
        begun = None if self._pass is None else self._pass()
        if begun is None:
            begun = self._begin(nbytes)
        # Those that are held, and this one: passes may overlap for long, and each lets its inputs go meanwhile.
        self._most_inputs = max(self._most_inputs, sys.getrefcount(begun) - 1)
        with torch.no_grad():
            if self._piece is None or self._taken_bytes + nbytes > self.size_bytes or self._stream != _stream(given.device):
                with self._arena.taking():
                    return given.detach().clone(), begun
            start, self._taken_bytes = self._taken_bytes, self._taken_bytes + nbytes
            # No view: each has a version of its own, as autograd checks that what it saved was not written to.
            kept = torch.empty(0, dtype=given.dtype, device=given.device)
            kept.set_(self._piece.untyped_storage(), start // given.element_size(), given.shape, given.stride())
            return kept.copy_(given.detach()), begun

    def _begin(self, nbytes: int) -> Pass:
        """The first input of a pass: its size says how large all of them will be."""
        wanted = self._most_inputs * nbytes
        if wanted > self.size_bytes and (self._refused_bytes is None or wanted < self._refused_bytes):
            self._enlarge(wanted)
        self._taken_bytes = 0
        begun = Pass()
        self._pass = weakref.ref(begun)
        return begun

    def _enlarge(self, wanted_bytes: int) -> None:
        device = self._arena.device
        self._piece = None
        self._arena.renew()
        if device.type == "cuda":
            torch.cuda.empty_cache()
        try:
            with self._arena.taking():
                self._piece = torch.empty(wanted_bytes, dtype=torch.uint8, device=device)
        except torch.OutOfMemoryError:
            self._refused_bytes = wanted_bytes  # inputs are tensors of their own then
        self._stream = _stream(device)


def _stream(device: torch.device) -> object:
    return torch.cuda.current_stream(device) if device.type == "cuda" else None
