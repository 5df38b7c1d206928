"""What ``unwall.shard`` is given, checked before anything changes; and where it runs."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from unwall.parallel.mesh import roles_of
from unwall.plans import Plan, PlanError
from unwall.runtime.hooks import engine_of
from unwall.runtime.shared_memory import refuse_shared
from unwall.tiers.device import default_device


def check_plan(plan: Plan) -> None:
    """Tiers that contradict each other are refused."""
    if not isinstance(plan, Plan):
        raise TypeError(f"plan is an unwall.Plan or None, got {type(plan).__name__}")
    states = plan.params if plan.optimizer == "auto" else plan.optimizer
    if (plan.grads == "device") != (states == "device") and plan.grads not in ("auto", "transient"):
        raise PlanError(
            f"grads={plan.grads!r}: gradients land where the update runs, and the optimizer state is on {states!r} here; "
            "use grads='auto' and choose the tier with optimizer="
        )


def check_replicas(plan: Plan, mesh: DeviceMesh) -> None:
    """Replicas average their gradients, whatever the plan says of a sum."""
    replicas = [name for name, role in roles_of(mesh).items() if role == "replicas" and mesh[name].size() > 1]
    if replicas and plan.reduce_op == "sum":
        raise PlanError(
            f"reduce_op='sum' with replicas ({replicas[0]!r}): gradients are averaged over replicas. Use 'mean', and multiply "
            "the loss by the number of ranks"
        )


def check_model(model: nn.Module) -> None:
    """A model whose parameters cannot be partitioned, or are already, is refused by name."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"unwall.shard takes an nn.Module, got {type(model).__name__}")
    for name, module in model.named_modules():
        if engine_of(module) is not None:
            what = "the model" if not name else f"its module {name}"
            raise RuntimeError(f"{what} is already sharded: call unwall.shard once, on the whole model")
    places: dict[torch.device, str] = {}
    for name, param in model.named_parameters():
        if param.is_complex():
            raise ValueError(f"parameter {name} is complex, which no optimizer here updates: hold it as view_as_real")
        if param.layout is not torch.strided:
            raise ValueError(f"parameter {name} is {param.layout}, expected a dense one: hold its values() as the parameter")
        if engine_of(param) is not None:
            raise RuntimeError(f"parameter {name} belongs to another sharded model: shard the model that holds both")
        places.setdefault(param.device, name)
    if len(places) > 1:
        listed = ", ".join(f"{name} on {device}" for device, name in places.items())
        raise ValueError(f"all parameters must be on one device before sharding, got {listed}: move them with model.to(...)")
    refuse_shared(model.named_parameters(), model.named_buffers())


def device_of(model: nn.Module, mesh: DeviceMesh | None) -> torch.device:
    """The device on which the model will run."""
    if mesh is not None and mesh.device_type == "cpu":
        return torch.device("cpu")
    first = next(model.parameters(), None)
    if first is not None and first.is_cuda:
        return first.device
    return default_device()


def process_group() -> dist.ProcessGroup | None:
    """The ranks over which a model without a mesh is cut. None: this process alone."""
    if dist.is_available() and dist.is_initialized():
        return dist.group.WORLD
    if _world_size() > 1:
        raise RuntimeError(
            f"this is one of {os.environ['WORLD_SIZE']} ranks (WORLD_SIZE), but torch.distributed is not initialised: call "
            "torch.distributed.init_process_group() first, or every rank would train a model of its own"
        )
    return None


def _world_size() -> int:
    """How many ranks the launcher has started."""
    said = os.environ.get("WORLD_SIZE", "1")
    try:
        return int(said)
    except ValueError:
        raise RuntimeError(
            f"WORLD_SIZE is {said!r} in the environment, expected a whole number: torchrun sets it; unset it for one process"
        ) from None
