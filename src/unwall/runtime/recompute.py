"""Activation checkpointing around a model's repeated blocks, without a change to the model."""

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.utils import checkpoint as checkpoint_source
from torch.utils.checkpoint import checkpoint, noop_context_fn

from unwall.plans import PlanError
from unwall.runtime.block_state import Buffers, Given
from unwall.runtime.same_again import SameAgain


def recompute_blocks(model: nn.Module, how: Callable[..., Any] = checkpoint) -> list[str]:
    """Puts torch's checkpoint (the non-reentrant kind) around the repeated blocks. Returns their names.

    A transformers model switches its own on, which knows what to do with caches. One that checkpoints already is left alone.
    ``how``: another function in the place of torch's.
    """
    blocks = list(repeated_blocks(model))
    if getattr(model, "is_gradient_checkpointing", False):
        return []
    if getattr(model, "supports_gradient_checkpointing", False):
        _refuse_prefix(model)
        enable: Callable[..., None] = model.gradient_checkpointing_enable  # type: ignore[assignment]
        enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        for module in model.modules() if how is not checkpoint else ():
            if "_gradient_checkpointing_func" in module.__dict__:
                module.__dict__["_gradient_checkpointing_func"] = how
        return [name for name, _ in blocks]
    for _, block in blocks:
        put_around(block, functools.partial(_recomputed, block, how=how))
    return [name for name, _ in blocks]


def _refuse_prefix(model: nn.Module) -> None:
    adapters = getattr(model, "peft_config", None)
    if isinstance(adapters, dict) and any(getattr(each, "peft_type", None) == "PREFIX_TUNING" for each in adapters.values()):
        raise PlanError(
            "prefix tuning gives its prefix to the blocks in a cache, and blocks that transformers recomputes are given none: "
            "write Plan(activations='auto'), which recomputes no block with something in its cache, or activations='keep'"
        )


def put_around(block: nn.Module, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Something runs around a block's forward from now on. A compiled block has it around all that was compiled, and around the
    hooks that fetch its parameters: inside, it would break the graph, and those hooks would not run again."""
    if type(block).__name__ == "OptimizedModule":  # which sets attributes of what it compiles, but for its dictionary
        block.__dict__["_compiled_call_impl"] = wrap(block._call_impl)
    elif block._compiled_call_impl is not None:
        block._compiled_call_impl = wrap(block._compiled_call_impl)
    else:
        block.forward = wrap(block.forward)


def repeated_blocks(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """The children of the outermost ModuleLists and Sequentials, as far as they have children themselves."""
    for name, child in module.named_children():
        path = f"{prefix}.{name}" if prefix else name
        listed = isinstance(module, nn.ModuleList | nn.Sequential) and not isinstance(child, nn.ModuleList | nn.Sequential)
        if listed and next(child.children(), None) is not None:
            yield path, child
        else:
            yield from repeated_blocks(child, path)


def _recomputed(block: nn.Module, forward: Callable[..., Any], how: Callable[..., Any]) -> Callable[..., Any]:
    """The same forward, whose activations are computed again in backward."""
    has_buffers = next(block.buffers(), None) is not None
    contexts = functools.partial(_contexts, Buffers(block)) if has_buffers else noop_context_fn
    same = SameAgain(block)
    compiled = {"context_fn": contexts} if has_buffers else {}  # Dynamo knows partials, and no other callables of a closure

    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled() or inside_checkpoint():
            return forward(*args, **kwargs)
        if torch.compiler.is_compiling():
            return how(forward, *args, use_reentrant=False, **compiled, **kwargs)
        # What is given by name goes the same way as the rest: looked after by autograd, and to host or disk.
        named = by_place(block, forward, args, kwargs, same)
        with same.whole():
            return how(named, *args, *kwargs.values(), use_reentrant=False, context_fn=contexts)

    return run


def _contexts(buffers: Buffers) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    return buffers.contexts()


def by_place(
    block: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], same: SameAgain
) -> Callable[..., Any]:
    """A block's forward that takes all its arguments by their place. See [Note: the same again] in block_state.py."""
    count, names, given, tried = len(args), tuple(kwargs), Given((*args, *kwargs.values())), same.begin()

    def run(*values: Any) -> Any:
        values = given.again(values)
        named = dict(zip(names, values[count:], strict=True))
        if tried is None:
            return forward(*values[:count], **named)
        return tried.run(lambda: forward(*values[:count], **named), values)

    run.__self__ = block  # type: ignore[attr-defined] # whose forward it is, as a method says it
    return run


def inside_checkpoint() -> bool:
    """Whether a checkpoint of the user's runs this, now or again in backward: then nothing of it is kept anyway."""
    found: FrameType | None = sys._getframe(2)
    while found is not None:
        if found.f_code.co_filename == _CHECKPOINT_FILE:
            return True
        found = found.f_back
    return False


_CHECKPOINT_FILE = checkpoint_source.__file__
