"""How one block of a model runs: its activations kept, moved to the host, or computed again in backward.

[Note: run again]
A forward that does not fit the card can run again, with its activations recomputed: nothing of it is left but what it has drawn
from random generators and counted in its buffers, and both are put back. A backward cannot: what autograd holds by then is what
it was given in forward. So an out-of-memory in backward is an error, and the next pass holds less.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, noop_context_fn

from unwall.runtime.block_state import Buffers, is_expanded
from unwall.runtime.kept_input import InArena
from unwall.runtime.partitioned import Partition
from unwall.runtime.recompute import by_place, inside_checkpoint
from unwall.shards import default_hooks

BEGUN = object()
"""A checkpoint has begun, and saves the block's inputs."""
_CACHES = ("past_key_values", "past_key_value", "layer_past")


class Generators:
    """Where random numbers come from, as it was."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._cpu = torch.get_rng_state()
        self._cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None

    def put_back(self) -> None:
        torch.set_rng_state(self._cpu)
        if self._cuda is not None:
            torch.cuda.set_rng_state(self._cuda, self._device)


class BlockCall:
    """The forward of one block, in each of the ways it can run."""

    def __init__(
        self, block: nn.Module, forward: Callable[..., Any], device: torch.device, how: Partition | InArena | None = None
    ) -> None:
        self._block = block
        self.forward = forward
        self.taker: Any = None
        """The ``pack`` of the checkpoint around the forward that runs now, ``BEGUN`` before that. No longer: it holds the
        input."""
        self._device = device
        self._partition = how if isinstance(how, Partition) else None
        self._checkpoint: Callable[..., Any] = checkpoint if how is None else how.checkpoint
        if self._partition is not None:
            self._checkpoint = self._partition.of(block)
        has_buffers = next(block.buffers(), None) is not None
        self._contexts: Any = Buffers(block).contexts if has_buffers else noop_context_fn

    def keep(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self.forward(*args, **kwargs)

    def recompute(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Only the inputs are held, those given by name too. A cache of keys and values would be filled twice: without it."""
        if inside_checkpoint() or (not self._block.training and caches_in(kwargs)):
            return self.forward(*args, **kwargs)
        kwargs = {name: _without_cache(name, value) for name, value in kwargs.items()}
        forward = by_place(self._block, self.forward, args, kwargs)

        def run(*given: Any) -> Any:
            self.taker = (default_hooks.top() or (None,))[0]
            try:
                return forward(*given)
            finally:
                self.taker = None

        self.taker = BEGUN
        try:
            return self._checkpoint(run, *args, *kwargs.values(), use_reentrant=False, context_fn=self._contexts)
        finally:
            self.taker = None

    def inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[torch.Tensor, int]]:
        """What is held to compute it again, each tensor with the number of parts that it is kept in one of."""
        cut, parts = (None, 1) if self._partition is None else self._partition.parts_of(self._block, (*args, *kwargs.values()))
        return [(tensor, parts if tensor is cut else 1) for tensor in given_tensors(args, kwargs)]

    def survive(
        self, run: Callable[[], Any], args: tuple[Any, ...], kwargs: dict[str, Any], free: Callable[[BaseException], bool]
    ) -> Any:
        """Runs or, where that does not fit the card, recomputes. See [Note: run again]. ``free`` makes room, and says whether
        that is of use."""
        generators = Generators(self._device)
        counted = [(buffer, buffer.clone()) for buffer in _buffers(self._block) if not is_expanded(buffer)]
        try:
            return run()
        except torch.OutOfMemoryError as error:
            if not free(error):
                raise
        # Here, and not in the handler: the exception holds the frames of the call, and they hold what it computed.
        generators.put_back()
        for buffer, value in counted:
            buffer.data.copy_(value)
        return self.recompute(args, kwargs)


def _buffers(block: nn.Module) -> Iterator[torch.Tensor]:
    """What ``block.buffers()`` gives, perhaps one of them twice, without making up names for all that is below it."""
    found = {block}
    below = [block]
    while below:
        module = below.pop()
        yield from (buffer for buffer in module._buffers.values() if buffer is not None)
        for child in module._modules.values():
            if child is not None and child not in found:
                found.add(child)
                below.append(child)


@contextmanager
def moving(layer: Any) -> Iterator[None]:
    """What is saved inside goes to the host."""
    before, layer.active = layer.active, True
    try:
        yield
    finally:
        layer.active = before


def _without_cache(name: str, value: Any) -> Any:
    return None if name in _CACHES else False if name == "use_cache" and value else value


def given_tensors(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """The tensors that a block is given, alone or in tuples. What is in a cache is not its input."""
    given = [*args, *kwargs.values()]
    parts = [part for value in given if isinstance(value, tuple | list) for part in value]
    return [value for value in (*given, *parts) if isinstance(value, torch.Tensor)]


def caches_in(kwargs: dict[str, Any]) -> list[Any]:
    """Caches of keys and values that a block is given."""
    return [kwargs[name] for name in _CACHES if kwargs.get(name) is not None]


def is_filled(cache: Any) -> bool:
    """Whether a cache holds something already. One that cannot be asked counts as if it did."""
    length = getattr(cache, "get_seq_length", None)
    return not callable(length) or bool(length())
