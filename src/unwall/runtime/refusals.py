"""Other ways to spread a model over ranks, or to record it, that cannot be put around or upon a sharded one: refused."""

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import nn

try:
    from torch.distributed._composable.contract import REGISTRY_KEY  # private to torch; without it a DTensor is noticed
except ImportError:  # pragma: no cover
    REGISTRY_KEY = ""

_AROUND = ("DistributedDataParallel", "FullyShardedDataParallel", "DataParallel")


def refuse_around(wrapper: nn.Module, inside: nn.Module, is_sharded: Callable[[nn.Module], bool]) -> None:
    """RuntimeError where ``wrapper`` is about to take in something that is, or holds, a sharded model, or a part of one, and
    that it would spread again."""
    name = next((kind.__name__ for kind in type(wrapper).__mro__ if kind.__name__ in _AROUND), None)
    if name is not None and any(is_sharded(module) for module in inside.modules()):
        raise _refused(name)


def refuse_reader(caller: str) -> None:
    """The same where the module (by its name) that reads a parameter belongs to FSDP, which registers what it wraps only after
    it has taken the parameters out of it; and where it is torch's part of a zero-bubble schedule that was written by hand."""
    if caller.startswith("torch.distributed.fsdp."):
        raise _refused("fully_shard" if "_fully_shard" in caller else "FullyShardedDataParallel")
    if caller == "torch.distributed.pipelining._backward":
        raise RuntimeError(
            "a zero-bubble schedule over a PipelineStage of torch's, with a sharded module: it looks for the autograd nodes of "
            "parameters that are not shown now, and would lose their gradients. Use unwall.pipeline(..., schedule=...), or a "
            "schedule that computes all gradients in one backward (GPipe, 1F1B, Interleaved1F1B)"
        )


def _refused(name: str) -> RuntimeError:
    return RuntimeError(
        f"{name} around a sharded model: unwall.shard partitions the model over the ranks and averages its gradients "
        f"already, so use the model without {name}"
    )


def refuse_tracing() -> None:
    """A pass is about to begin: not one that a compiler for other machines records."""
    if torch._C._get_tracing_state() is not None:
        _refuse_recording("torch.jit.trace")
    if torch.compiler.is_exporting():
        _refuse_recording("torch.export")


def _refuse_script() -> NoReturn:
    _refuse_recording("torch.jit.script")


def _refuse_recording(name: str) -> NoReturn:
    raise RuntimeError(
        f"{name} of a sharded model: its parameters come and go. Build a plain model, load model.state_dict() into it, and use "
        f"{name} on that"
    )


class _Applied(dict[str, Any]):
    """Where torch notes which of its functions were applied to a module. It looks here before it applies one."""

    def __contains__(self, name: object) -> bool:
        if name == "fully_shard":
            raise RuntimeError(
                "fully_shard on a sharded model: unwall.shard partitions the model over the ranks and averages its gradients "
                "already, so use the model without fully_shard"
            )
        return super().__contains__(name)


def refuse_upon(module: nn.Module) -> None:
    """From now on ``fully_shard`` and ``torch.jit.script`` of this module raise."""
    module.__dict__["__prepare_scriptable__"] = _refuse_script
    if REGISTRY_KEY:
        module.__dict__[REGISTRY_KEY] = _Applied(module.__dict__.get(REGISTRY_KEY, {}))
