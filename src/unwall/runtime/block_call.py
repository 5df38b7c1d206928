"""How one block of a model runs: its activations kept, moved to the host, or computed again in backward.

[Note: run again]
A forward that does not fit the card can run again, with its activations recomputed: nothing of it is left but what it has drawn
from random generators and counted in buffers and attributes (own_state.py), and these are put back. A backward cannot: what
autograd holds by then is what it was given in forward. So an out-of-memory in backward is an error, and the next pass holds
less.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, noop_context_fn

from unwall.runtime.block_state import Buffers, is_expanded
from unwall.runtime.kept_input import InArena
from unwall.runtime.own_state import OwnState
from unwall.runtime.partitioned import Partition
from unwall.runtime.recompute import by_place, inside_checkpoint
from unwall.runtime.same_again import SameAgain
from unwall.runtime.try_again import AsBefore, holders_in, hooks_of_others, may_run_again
from unwall.shards import default_hooks

BEGUN = object()
"""A checkpoint has begun, and saves the block's inputs."""
_CACHES = ("past_key_values", "past_key_value", "layer_past", "cache_params")


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
        self._same = SameAgain(block)
        self._holders = holders_in(block)
        self._own = OwnState(block)

    def keep(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self.forward(*args, **kwargs)

    def recompute(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Only the inputs are held, those given by name too. A cache of keys and values would be filled twice: without it."""
        if inside_checkpoint() or (not self._block.training and caches_in(kwargs)):
            return self.forward(*args, **kwargs)
        kwargs = {name: _without_cache(name, value) for name, value in kwargs.items()}
        forward = by_place(self._block, self.forward, args, kwargs, self._same)

        def run(*given: Any) -> Any:
            self.taker = (default_hooks.top() or (None,))[0]
            try:
                return forward(*given)
            finally:
                self.taker = None

        self.taker = BEGUN
        try:
            with self._same.whole():
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
        counted = [
            (module, name, buffer, None if is_expanded(buffer) else buffer.clone())
            for module, name, buffer in _buffers(self._block)
        ]
        given = [(tensor, tensor._version) for tensor in given_tensors(args, kwargs) if not tensor.is_inference()]
        own = self._own.note()
        try:
            output = run()
        except torch.OutOfMemoryError as error:
            changed = any(tensor._version != version for tensor, version in given)
            if changed or not (own is None or own.can_be_put_back()) or not free(error):
                raise
        else:
            self._own.ended(own)
            return output
        # Here, and not in the handler: the exception holds the frames of the call, and they hold what it computed.
        generators.put_back()
        if own is not None:
            own.put_back()
        for module, name, buffer, value in counted:
            module._buffers[name] = buffer
            if value is not None:
                buffer.data.copy_(value)
        return self.recompute(args, kwargs)

    def try_kept(self, args: tuple[Any, ...], kwargs: dict[str, Any], free: Callable[[BaseException], bool]) -> Any:
        """The same where there is room for everything, and all but for free. See [Note: tried again] in try_again.py."""
        before, own = AsBefore(self._holders, self._device, (*args, *kwargs.values())), self._own.note()
        try:
            output = self.forward(*args, **kwargs)
        except torch.OutOfMemoryError as error:
            whole = before.holds(self._block) and (own is None or own.can_be_put_back())
            if not (may_run_again() and whole and self.leaves_nothing(args, kwargs) and free(error)):
                raise
        else:
            if own is not None:
                self._own.ended(own)
            return output
        before.put_back()
        if own is not None:
            own.put_back()
        return (self.recompute if torch.is_grad_enabled() else self.keep)(args, kwargs)

    def leaves_nothing(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether a call that ended half way has left nothing in what it was given. With gradients it runs again without a
        cache, in training."""
        if torch.is_grad_enabled():
            return self._block.training or not caches_in(kwargs)
        return all(map(_is_plain, (*args, *kwargs.values()))) and not hooks_of_others(self._block)


def _is_plain(value: Any) -> bool:
    """Whether a block cannot leave anything in it that is not noticed."""
    if isinstance(value, tuple | list):
        return all(map(_is_plain, value))
    plain = torch.Tensor | torch.dtype | torch.device | torch.Size | bool | int | float | str | None
    return value is None or isinstance(value, plain)


def _buffers(block: nn.Module) -> list[tuple[nn.Module, str, torch.Tensor]]:
    """What ``block.buffers()`` gives, perhaps some of them twice, without making up names for all that is below it."""
    holders, found, below = [block] if block._buffers else [], {block}, [block]
    while below:
        for child in below.pop()._modules.values():
            if child is not None:
                if child._buffers:
                    holders.append(child)
                if child._modules and child not in found:  # most have nothing below them
                    found.add(child)
                    below.append(child)
    return [(module, name, buffer) for module in holders for name, buffer in module._buffers.items() if buffer is not None]


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
    return [kwargs[name] for name in _CACHES if kwargs.get(name) is not None] if kwargs else []


def is_filled(cache: Any) -> bool:
    """Whether a cache holds something already: keys and values, or the state of a recurrence. One that cannot be asked counts
    as if it did."""
    answers = []
    for question in ("get_seq_length", "has_previous_state"):
        try:
            answers.append(bool(getattr(cache, question)()))
        except (AttributeError, TypeError, ValueError):  # a cache of the other kind alone
            continue
    return any(answers) or not answers
