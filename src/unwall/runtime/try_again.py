"""An out-of-memory in a forward: what was cached is dropped, and the module that failed runs again.

[Note: tried again]
torch's allocator tries again by itself after it has given back what it had cached, then it tells observers, and then it raises:
there is no place for us before that. So what can be tried again is what we call: a module's forward. One that has run in part
must leave nothing behind:

- A repeated block, with ``Plan(activations="auto")``, may run twice anyway ([Note: run again] in block_call.py). Where all is
  kept, no tensor is copied before it runs: it is tried again where by their versions its inputs and buffers are as they were.
  What it has left in attributes is put back ([Note: half a call] in own_state.py).
- A layer of torch's outside of the blocks (the embedding, the last norm, the head) is a function of its input and parameters.

Not tried again: what a checkpoint runs, which counts what is saved; a backward; what a block has put into a cache of keys and
values; a block without gradients that has hooks of the user's, who may collect what it gives; anything that tensor ranks run
together; and operations of the user's own code outside of these modules. They raise, and the next pass holds less.
"""

import functools
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from unwall.runtime.engine import Engine
from unwall.runtime.recompute import inside_checkpoint, put_around

_FUNCTIONS = frozenset(
    {nn.Linear, nn.Embedding, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.ConvTranspose2d}
)
"""Layers whose forward reads its input and parameters, draws nothing and writes nothing."""


class AsBefore:
    """What the call of a block could change, noted without a copy of a tensor. ``holders``: its modules that have buffers."""

    __slots__ = ("_buffers", "_cpu", "_cuda", "_device", "_given", "_holders")

    def __init__(self, holders: list[nn.Module], device: torch.device, given: Iterable[Any]) -> None:
        self._device, self._holders = device, holders
        self._given = [(tensor, tensor._version) for tensor in _tensors(given) if not tensor.is_inference()]
        self._buffers = [(tensor, tensor._version) for tensor in _buffers(holders)]
        self._cpu = torch.get_rng_state()
        self._cuda = _offset(device)

    def holds(self, block: nn.Module) -> bool:
        """Whether all but random generators is as it was. A batch norm does not count its writes."""
        if self._device.type == "cuda" and self._cuda is None:
            return False
        holders = holders_in(block)
        if holders != self._holders or any(isinstance(module, _NormBase) and module.training for module in holders):
            return False
        now = [id(tensor) for tensor in _buffers(holders)]
        return now == [id(tensor) for tensor, _ in self._buffers] and all(
            tensor._version == version for tensor, version in (*self._given, *self._buffers)
        )

    def put_back(self) -> None:
        torch.set_rng_state(self._cpu)
        if self._cuda is not None:
            torch.cuda.default_generators[self._device.index or 0].set_offset(self._cuda)


def holders_in(block: nn.Module) -> list[nn.Module]:
    return [module for module in block.modules() if module._buffers]


def _tensors(given: Iterable[Any]) -> Iterator[torch.Tensor]:
    """Alone or in tuples. Called for each block: quickly."""
    for value in given:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, tuple | list):
            yield from _tensors(value)


def _buffers(holders: list[nn.Module]) -> Iterator[torch.Tensor]:
    for module in holders:
        yield from (tensor for tensor in module._buffers.values() if tensor is not None and not tensor.is_inference())


def _offset(device: torch.device) -> int | None:
    """How far the card's generator is. None where there is none, or it cannot be asked: a graph is being captured."""
    if device.type != "cuda":
        return None
    try:
        return int(torch.cuda.default_generators[device.index or 0].get_offset())
    except RuntimeError:
        return None


def may_run_again() -> bool:
    """Whether what runs now counts for itself: not inside a checkpoint, nor in a backward. Asked after a failure."""
    return torch._C._current_graph_task_id() == -1 and not inside_checkpoint()


def hooks_of_others(block: nn.Module) -> bool:
    """Whether someone else's hooks see what the modules of a block give."""
    hooks = (
        hook
        for module in block.modules()
        for kind in (module._forward_pre_hooks, module._forward_hooks)
        for hook in kind.values()
    )
    return any(not _module_of(hook).startswith("unwall.") for hook in hooks)


def _module_of(hook: Any) -> str:
    while isinstance(hook, functools.partial):
        hook = hook.func
    return str(getattr(hook, "__module__", None) or type(hook).__module__)


def try_layers_again(engine: Engine, model: nn.Module, blocks: list[nn.Module]) -> None:
    """Layers of torch's outside of ``blocks`` run again after an out-of-memory. Only where groups come and go: elsewhere
    nothing is cached that could be dropped."""
    if not any(group.fetch_bytes for group in engine.groups) or engine.others.tensor:
        return
    inside = {module for block in blocks for module in block.modules()}
    free = functools.partial(_free, weakref.ref(engine))
    for module in model.modules():
        if type(module) in _FUNCTIONS and module not in inside and "forward" not in module.__dict__:
            put_around(module, functools.partial(_again, free))


def _again(free: Callable[[BaseException], bool], forward: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return forward(*args, **kwargs)
        try:
            return forward(*args, **kwargs)
        except torch.OutOfMemoryError as error:
            if not (may_run_again() and free(error)):
                raise
        return forward(*args, **kwargs)  # not in the handler: the exception holds the frames, and they what was computed

    return run


def _free(engine_of: "weakref.ref[Engine]", error: BaseException) -> bool:
    engine = engine_of()
    if engine is None:
        return False
    if engine.activations is not None:
        return bool(engine.activations.free(error))
    return make_room(engine)


def make_room(engine: Engine) -> bool:
    """Drops what was cached. False where it cannot be helped: the other ranks were told of the failure already."""
    if engine.ranks.size > 1 and engine.executor.agreement.failed:
        return False
    engine.executor.drop_cache()
    engine.device.give_back()
    return True
