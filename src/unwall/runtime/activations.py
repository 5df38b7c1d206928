"""What a plan asks for activations: kept, computed again in backward, moved to the host meanwhile, or whatever is fastest.

With ``"host"`` the repeated blocks are recomputed from their inputs, and those inputs wait on the host (``"disk"``: on disk).
In a model without such blocks everything that autograd saves does: that is far more than a link carries while it is computed.
``"auto"`` decides for each block (runtime/auto.py).
"""

import functools
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from unwall.runtime.activation_room import ActivationRoom
from unwall.runtime.auto import Auto
from unwall.runtime.beside import Beside
from unwall.runtime.block_call import BlockCall
from unwall.runtime.card import CountedCard, card_of
from unwall.runtime.engine import Engine
from unwall.runtime.kept_input import InArena
from unwall.runtime.partitioned import Partition
from unwall.runtime.recompute import put_around, recompute_blocks, repeated_blocks
from unwall.runtime.saved_on_disk import SavedOnDisk
from unwall.runtime.saved_on_host import SavedOnHost
from unwall.runtime.sequence_tiles import Tiles
from unwall.runtime.try_again import try_layers_again
from unwall.schedule.limit import Limit


def arrange_activations(engine: Engine, model: nn.Module) -> None:
    """Does what the plan says. ``"keep"`` is what autograd does anyway."""
    kind, tiles = engine.plan.activations, engine.plan.sequence_tiles
    if tiles is not None:
        Tiles(model, tiles)
    if kind == "auto":
        decide_by_measuring(engine, model)
    blocks = [block for _, block in repeated_blocks(model)] if engine.activations is not None else []
    try_layers_again(engine, model, blocks)
    if kind in ("recompute", "host", "disk"):
        found = recompute_blocks(model, _how(engine))
        if kind == "recompute" and not found:
            _say_nothing_is_recomputed(model)
    if kind == "host":
        engine.forward.saved.layers.append(_mover(engine))
    if kind == "disk":
        engine.forward.saved.layers.append(_to_disk(engine))


def _how(engine: Engine) -> Callable[..., Any]:
    """How blocks are recomputed: by torch's checkpoint, or by one that keeps their inputs in another form."""
    found = _form(engine)
    # What goes to the host, or to disk, need not be in an arena before.
    away = engine.plan.activations in ("host", "disk") and isinstance(found, InArena)
    return checkpoint if found is None or away else found.checkpoint


def _form(engine: Engine) -> Partition | InArena | None:
    """What is kept of the inputs of recomputed blocks. None: those themselves."""
    ranks, arena = [dimension.ranks for dimension in engine.others.tensor], engine.device.inputs_arena
    if engine.plan.partition_activations and ranks:
        return Partition(ranks[0])
    return None if arena is None else InArena(arena)


def decide_by_measuring(engine: Engine, model: nn.Module) -> None:
    """``"auto"``. Without an accelerator and without ``device_bytes`` there is nothing to fill, and everything is kept."""
    ledger, device = engine.device.ledger, engine.device.device
    blocks = list(dict.fromkeys(block for name, block in repeated_blocks(model) if not _inside_compiled(model, name)))
    if not blocks or (engine.plan.budget_device_bytes is None and device.type != "cuda"):
        return
    if getattr(model, "is_gradient_checkpointing", False):
        warnings.warn(f"{type(model).__name__} checkpoints already, so Plan(activations='auto') leaves it alone", stacklevel=4)
        return

    owner = weakref.ref(engine)

    def room(held: Callable[[], int]) -> ActivationRoom:
        engine = owner()
        assert engine is not None
        budget = engine.plan.budget_device_bytes
        card = card_of(budget, device, lambda: ledger.live_bytes, held)
        counted = isinstance(card, CountedCard)
        if budget is not None and any(group.fetch_bytes for group in engine.groups):
            engine.executor.keep_within(Limit(card, lambda: ledger.live_bytes, engine.least_device_bytes, counted=counted))
        return ActivationRoom(card, lambda: ledger.live_bytes, engine.least_device_bytes, counted=counted)

    mover = _mover(engine)
    mover.active = False
    auto = engine.activations = Auto(engine, len(blocks), room, mover, _is_state(engine), Beside(model, blocks))
    if engine.plan.sequence_tiles is None and device.type == "cuda":
        auto.tiles = Tiles(model)
    form = _form(engine)
    for number, block in enumerate(blocks):
        put_around(block, functools.partial(_decided, auto, number, block, form=form, device=device))


def _decided(
    auto: Auto,
    number: int,
    module: nn.Module,
    forward: Callable[..., Any],
    form: Partition | InArena | None,
    device: torch.device,
) -> Callable[..., Any]:
    """The same forward, whose activations are kept, moved or computed again."""
    block = BlockCall(module, forward, device, form)

    @functools.wraps(block.forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or torch._C._current_graph_task_id() != -1:
            return block.forward(*args, **kwargs)
        if not torch.is_grad_enabled():
            return auto.call_kept(block, args, kwargs)
        return auto.call(number, block, args, kwargs)

    return run


def _is_state(engine: Engine) -> Callable[[torch.Tensor], bool]:
    """Which tensors are views of parameters."""
    saved = engine.forward.saved
    staying = engine.staying

    def is_state(tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage()._cdata in staying or saved.group_of(tensor) is not None

    return is_state


def _mover(engine: Engine) -> SavedOnHost:
    return SavedOnHost(engine.tiers.links, engine.tiers.host, engine.device, _is_state(engine))


def _to_disk(engine: Engine) -> SavedOnDisk:
    return SavedOnDisk(engine.tiers.links, engine.tiers.host, engine.device, _is_state(engine))


def _inside_compiled(model: nn.Module, name: str) -> bool:
    """Whether a module above this one is compiled, which then runs as one."""
    above = name.split(".")[:-1]
    return any(_is_compiled(model.get_submodule(".".join(above[:depth]))) for depth in range(len(above) + 1))


def _is_compiled(module: nn.Module) -> bool:
    return type(module).__name__ == "OptimizedModule" or module._compiled_call_impl is not None


def _say_nothing_is_recomputed(model: nn.Module) -> None:
    if getattr(model, "is_gradient_checkpointing", False):
        why = "checkpoints already"
    else:
        why = (
            "has no repeated blocks (children of a ModuleList or a Sequential that have children of their own): wrap what "
            "should be recomputed in torch.utils.checkpoint"
        )
    warnings.warn(f"Plan(activations='recompute') changes nothing: {type(model).__name__} {why}", stacklevel=4)
