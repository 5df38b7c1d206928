"""Checkpoints of blocks that every tensor rank would keep whole, kept in parts (``Plan(partition_activations=True)``).

[Note: a part of a checkpoint]
Between the blocks of a tensor-parallel model the hidden state is the same on all tensor ranks, and with recomputed activations
that is what each of them holds for backward. Here each keeps 1/T of its elements, and the ranks gather them just before the
block runs again ([Note: another form] in kept_input.py). The part is what torch's checkpoint saves, so with
``activations="host"`` it goes to the host. The forward itself is given the input as it is: nothing is exchanged there.

An input that the ranks have cut among them already (sequence parallelism) stays as it is. A DTensor says which it is. Of a
plain tensor nobody knows: the first time a block sees a shape the ranks compare checksums, and a block whose input differs is
left alone from then on. What is gathered later is compared with the checksum of what was there in forward, without waiting for
the device: a difference is an error, never another result.
"""

import functools
import weakref
import zlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint as plain_checkpoint
from torch.utils.checkpoint import noop_context_fn

from unwall.runtime.kept_input import checkpoint_keeping, input_of
from unwall.shards.collectives import Ranks
from unwall.shards.local import is_distributed, local

_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


class Whole(NamedTuple):
    """What a part becomes again."""

    shape: torch.Size
    stride: tuple[int, ...]
    numel: int
    spread: tuple[Any, Any, torch.Size, tuple[int, ...]] | None
    """A DTensor's mesh, placements, shape and stride. None: it is a plain tensor."""
    checksum: torch.Tensor


class Partition:
    """Keeps the inputs of recomputed blocks in parts, over the tensor ranks. See [Note: a part of a checkpoint]."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._known: weakref.WeakKeyDictionary[nn.Module, dict[tuple[Any, ...], bool]] = weakref.WeakKeyDictionary()

    def checkpoint(
        self,
        function: Callable[..., Any],
        *args: Any,
        use_reentrant: bool = False,  # noqa: ARG002 (as torch's checkpoint takes it)
        context_fn: Any = noop_context_fn,
        **named: Any,
    ) -> Any:
        """torch's checkpoint, of which the block's input is kept in parts where it can be."""
        return self._checkpoint(_block_of(function), function, *args, context_fn=context_fn, **named)

    def of(self, block: nn.Module) -> Callable[..., Any]:
        """The same for one block, whatever function runs it."""
        return functools.partial(self._checkpoint, block)

    def _checkpoint(
        self,
        block: nn.Module | None,
        function: Callable[..., Any],
        *args: Any,
        use_reentrant: bool = False,
        context_fn: Any = noop_context_fn,
        **named: Any,
    ) -> Any:
        at, given = input_of(args)
        if given is None or torch.compiler.is_compiling() or not self.is_whole(block, given):
            return plain_checkpoint(function, *args, use_reentrant=use_reentrant, context_fn=context_fn, **named)
        part, whole = self._cut(given)
        return checkpoint_keeping(part, lambda kept: self._gather(kept, whole), at, function, args, context_fn, named)

    def parts_of(self, block: nn.Module, args: tuple[Any, ...]) -> tuple[torch.Tensor | None, int]:
        """Which of a block's arguments is kept in parts, and in how many."""
        _, given = input_of(args)
        return (given, self._ranks.size) if given is not None and self.is_whole(block, given) else (None, 1)

    def is_whole(self, block: nn.Module | None, given: torch.Tensor) -> bool:
        """Whether all tensor ranks have the same there, and it can be cut."""
        held = _held(given)
        if not _is_dense(held) or held.device.type != self._ranks.device.type or held.dtype.itemsize not in _INTEGERS:
            return False
        if is_distributed(given):
            return all(placed.is_replicate() for placed in given.placements)  # type: ignore[attr-defined]
        if block is None:
            return False
        known = self._known.setdefault(block, {})
        key = (given.shape, given.stride(), given.dtype)
        if key not in known:
            known[key] = all(known.values()) and self._same_everywhere(given)
        return known[key]

    def _same_everywhere(self, given: torch.Tensor) -> bool:
        data = _flat(_held(given)).view(torch.uint8).cpu().numpy()
        mine = tuple(given.shape), given.stride(), str(given.dtype), zlib.crc32(data.tobytes())
        every = self._ranks.control.every(mine, "the input of a block, which partition_activations=True would cut")
        return all(theirs == mine for theirs in every)

    def _cut(self, given: torch.Tensor) -> tuple[torch.Tensor, Whole]:
        with torch.no_grad():
            held, spread = _held(given), None
            if is_distributed(given):
                spread = (given.device_mesh, given.placements, given.shape, given.stride())  # type: ignore[attr-defined]
            flat = _flat(held)
            length = -(-flat.numel() // self._ranks.size)
            part = flat.new_zeros(length)
            mine = flat[self._ranks.rank * length : (self._ranks.rank + 1) * length]
            part[: mine.numel()] = mine
            return part, Whole(held.shape, held.stride(), flat.numel(), spread, _checksum(flat))

    def _gather(self, part: torch.Tensor, whole: Whole) -> torch.Tensor:
        with torch.no_grad():
            every = torch.empty(part.numel() * self._ranks.size, dtype=part.dtype, device=part.device)
            self._ranks.all_gather(every, part.contiguous()).wait()
            flat = every[: whole.numel]
            torch._assert_async(
                _checksum(flat) == whole.checksum,
                "partition_activations=True: the input of a block was not the same on all tensor ranks, although it was when "
                "the block first saw this shape. Leave partition_activations out",
            )
            value = flat.as_strided(whole.shape, whole.stride)
            return value if whole.spread is None else _distributed(value, *whole.spread)


def _distributed(part: torch.Tensor, mesh: Any, placements: Any, shape: torch.Size, stride: tuple[int, ...]) -> torch.Tensor:
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(part, mesh, placements, run_check=False, shape=shape, stride=stride)


def _block_of(function: Callable[..., Any]) -> nn.Module | None:
    """Whose forward it is."""
    inner = getattr(function, "func", function)
    owner = getattr(inner, "__self__", None)
    return owner if isinstance(owner, nn.Module) else None


def _held(given: torch.Tensor) -> torch.Tensor:
    """What this rank holds of it. The result of a collective that is still on its way is waited for: the block needs it."""
    held = local(given.detach())
    arrived: torch.Tensor = held.trigger_wait() if hasattr(held, "trigger_wait") else held
    return arrived


def _is_dense(held: torch.Tensor) -> bool:
    """Whether its elements fill a run of memory, in whatever order."""
    if held.layout is not torch.strided or type(held) is not torch.Tensor or held.numel() == 0:
        return False
    expected = 1
    for stride, size in sorted(zip(held.stride(), held.shape, strict=True)):
        if size > 1:
            if stride != expected:
                return False
            expected *= size
    return True


def _flat(held: torch.Tensor) -> torch.Tensor:
    """The run of memory."""
    return held.detach().as_strided((held.numel(),), (1,))


def _checksum(flat: torch.Tensor) -> torch.Tensor:
    """Of the bits. On the device: nobody waits for it."""
    return flat.view(_INTEGERS[flat.dtype.itemsize]).sum(dtype=torch.int64)
