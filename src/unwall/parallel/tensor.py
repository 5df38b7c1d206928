"""``unwall.parallelize``: a transformers model spread over tensor ranks by the plan it brings along."""

import re
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from unwall.parallel.mesh import adapted_layers, describe, roles_of, spread_parameters
from unwall.runtime.hooks import engine_of
from unwall.runtime.init import building, is_paged


def parallelize(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Spreads a ``transformers`` model over the tensor-parallel dimension of a mesh, in place, and returns it.

    The model's own plan says which weights are cut by rows or columns. Build the model whole or on the meta device, with the
    same values on every rank; then ``unwall.shard(model, plan, mesh)`` with the same mesh. A mesh without such a dimension, or
    with one rank along it, changes nothing. For other models use torch's ``parallelize_module(model, mesh["tp"], ...)``.
    Adapters come between the two: ``peft.get_peft_model`` spreads LoRA's as it finds the layers.
    """
    spread = [name for name, role in roles_of(mesh).items() if role == "tensor"]
    if len(spread) > 1:
        raise ValueError(f"{describe(mesh)} has several tensor-parallel dimensions ({', '.join(spread)}): one is expected")
    along = None if not spread else mesh if mesh.ndim == 1 else mesh[spread[0]]
    plan = _plan_of(model)
    if along is None or along.size() == 1:
        return model
    _check(model, along.size())
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism

    tied = _tied(model)
    _warn_of_nothing(plan)
    apply_tensor_parallelism(model, along)
    _tie_again(model, tied, along)
    _sum_gradients(model, along)
    _tell_adapters(model, plan, along)
    return model


def _plan_of(model: nn.Module) -> dict[str, str]:
    plan = getattr(model, "tp_plan", None)
    if not isinstance(plan, dict) or not plan:
        raise ValueError(
            f"{type(model).__name__} has no tensor-parallel plan of its own (tp_plan of transformers models): spread it with "
            "torch.distributed.tensor.parallel.parallelize_module(model, mesh['tp'], {...}), or leave the 'tp' dimension out"
        )
    return plan


def _warn_of_nothing(plan: dict[str, str]) -> None:
    from transformers.distributed.tensor_parallel import ALL_PARALLEL_STYLES

    unknown = sorted({style for style in plan.values() if style not in ALL_PARALLEL_STYLES})
    if unknown:
        raise ValueError(f"the model's tensor-parallel plan names styles that this transformers does not have: {unknown}")


def _check(model: nn.Module, ranks: int) -> None:
    """Before anything is changed."""
    if building():
        raise RuntimeError("unwall.parallelize inside unwall.init: values are still paged; build the model on the meta device")
    for name, param in model.named_parameters():
        if engine_of(param) is not None:
            raise RuntimeError("unwall.parallelize comes before unwall.shard: the model is sharded already")
        if is_paged(param):
            raise RuntimeError(
                f"{name} was built inside unwall.init and waits there for unwall.shard: build a model for unwall.parallelize "
                "whole, or on the meta device (with torch.device('meta')), and load its weights afterwards"
            )
    for name, _ in spread_parameters(model):
        raise ValueError(f"parameter {name} is a DTensor already: the model was parallelized before")
    for name, _ in adapted_layers(model):
        raise ValueError(f"{name} has an adapter already: call unwall.parallelize first, then peft.get_peft_model")
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    for field in ("num_attention_heads", "num_key_value_heads"):
        heads = getattr(text, field, None)
        if isinstance(heads, int) and heads % ranks:
            raise ValueError(f"{field} is {heads} and cannot be spread over {ranks} tensor ranks: choose a divisor of it")


def _tied(model: nn.Module) -> list[tuple[str, ...]]:
    """The names of parameters that are one."""
    names: dict[int, list[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(param), []).append(name)
    return [tuple(found) for found in names.values() if len(found) > 1]


def _tie_again(model: nn.Module, tied: list[tuple[str, ...]], along: DeviceMesh) -> None:
    """Names that were one parameter become one again: that of the name that was spread, if any was."""
    from transformers.distributed.tensor_parallel import ALL_PARALLEL_STYLES

    from unwall.shards.local import is_distributed

    for names in tied:
        found = {name: model.get_parameter(name) for name in names}
        spread = [param for param in found.values() if is_distributed(param)]
        if not spread:
            continue
        placements = {param.placements for param in spread}  # type: ignore[attr-defined]
        if len(placements) > 1:
            raise ValueError(f"{' and '.join(names)} are one parameter, but the plan spreads them differently: untie them")
        for name, param in found.items():
            path, _, own = name.rpartition(".")
            module: Any = model.get_submodule(path)
            if not is_distributed(param):
                style = "embedding_rowwise" if isinstance(module, nn.Embedding) else None
                if style is None or style not in ALL_PARALLEL_STYLES:
                    raise ValueError(f"{name} is tied to a parameter that is spread, and its module is not: untie them")
                ALL_PARALLEL_STYLES[style].install_forward(module, along)
            module._parameters[own] = spread[0]


def _sum_gradients(model: nn.Module, along: DeviceMesh) -> None:
    """Plans for norms of single heads sum the gradient of a copy in a hook that reads ``param.grad``, where unwall leaves
    nothing. The same is done on the way there instead."""
    for module in model.modules():
        for key, hook in list(module._backward_hooks.items()):
            if "ReplicatedWithGradAllReduce" in getattr(hook, "__qualname__", ""):
                del module._backward_hooks[key]
                module.register_forward_pre_hook(SumGradients(along.get_group()))


def _tell_adapters(model: nn.Module, plan: dict[str, str], along: DeviceMesh) -> None:
    """PEFT looks for these two attributes of a layer, and spreads what it puts beside it accordingly."""
    for name, module in model.named_modules():
        style = plan.get(re.sub(r"\.\d+(?=\.|$)", ".*", name))
        if isinstance(module, nn.Linear) and style in ("colwise", "rowwise"):
            module.__dict__.update(_hf_tp_plan=style, _hf_device_mesh=along)


class SumGradients:
    """Before a module's forward: from now on each of its parameters' gradients is summed over the tensor ranks."""

    def __init__(self, group: "dist.ProcessGroup") -> None:
        self._group = group
        self._hooked: set[int] = set()

    def __call__(self, module: nn.Module, _: Any) -> None:
        for param in module.parameters(recurse=False):
            if param.requires_grad and id(param) not in self._hooked:
                self._hooked.add(id(param))
                param.register_hook(self._sum)

    def _sum(self, grad: torch.Tensor) -> torch.Tensor:
        total = grad.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=self._group)
        return total
