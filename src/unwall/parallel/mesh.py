"""What the dimensions of a device mesh mean, by their names."""

from collections.abc import Iterator
from typing import NamedTuple

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from unwall.shards.collectives import Ranks
from unwall.shards.dimensions import Dimension, Others
from unwall.shards.local import is_distributed

DATA = ("dp", "data", "data_parallel", "dp_shard", "fsdp")
REPLICAS = ("replicate", "ddp")
TENSOR = ("tp", "tensor", "tensor_parallel", "model", "mp")
PIPELINE = ("pp", "pipe", "pipeline", "pipeline_parallel")
NODES = ("node", "nodes")
"""Of the data-parallel ranks, which lie in several nodes: the dimension after it is inside a node."""


def role_of(name: str) -> str:
    """What a dimension is for: ``data``, ``replicas``, ``tensor``, ``pipeline`` or ``nodes``. ValueError where its name
    does not tell."""
    if any(word in name for word in REPLICAS):
        return "replicas"
    for role, names in (("data", DATA), ("tensor", TENSOR), ("pipeline", PIPELINE), ("nodes", NODES)):
        if name in names:
            return role
    raise ValueError(
        f"the mesh has a dimension {name!r}, and its name does not say what it is for. Data-parallel: 'dp' (or 'dp_shard', "
        "with 'dp_replicate' for replicas, or 'node' before it), tensor-parallel: 'tp', pipeline-parallel: 'pp'"
    )


def names_of(mesh: DeviceMesh) -> tuple[str, ...]:
    """Its dimensions. One without a name is data-parallel. TypeError for what is no mesh."""
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(
            f"mesh is a DeviceMesh, as torch.distributed.device_mesh.init_device_mesh makes it, got {type(mesh).__name__}"
        )
    names = tuple(mesh.mesh_dim_names or ())
    if not names and mesh.ndim == 1:
        return ("dp",)
    if not names:
        raise ValueError(
            f"a mesh of {mesh.ndim} dimensions without names: say init_device_mesh(..., mesh_dim_names=('dp', 'tp')), or pass "
            "one of its dimensions"
        )
    return names


def roles_of(mesh: DeviceMesh) -> dict[str, str]:
    """Each dimension's role. A mesh of one dimension is data-parallel, whatever its name, unless that says otherwise."""
    names = names_of(mesh)
    if mesh.ndim == 1 and names[0] not in (*TENSOR, *PIPELINE):
        return {names[0]: "data"}
    roles = {name: role_of(name) for name in names}
    for role in ("data", "replicas"):
        listed = [name for name, found in roles.items() if found == role]
        if len(listed) > 1:
            raise ValueError(f"the mesh has several dimensions for {role} ({', '.join(listed)}): flatten them into one")
    listed = list(roles.values())
    if "nodes" in listed and listed[listed.index("nodes") + 1 :][:1] != ["data"]:
        raise ValueError(
            f"the mesh has the dimensions {', '.join(roles)}: 'node' says on which node data-parallel ranks are, and stands "
            "right before their own dimension: ('node', 'dp')"
        )
    replicated = [name for name, role in roles.items() if role == "replicas" and mesh.size(names.index(name)) > 1]
    if replicated and "data" not in roles.values():
        raise ValueError(
            f"the mesh has replicas ({replicated[0]!r}) and no dimension to shard over: call it 'dp' where only the data is "
            "spread, and use Plan(stage=0) to keep everything on every rank"
        )
    return roles


def check_mesh(mesh: DeviceMesh, model: nn.Module) -> None:
    """ValueError, before anything is allocated, for a mesh that does not fit the ranks or the model."""
    names_of(mesh)
    roots = mesh._get_root_mesh()
    if mesh.ndim > 1 and roots.size() != dist.get_world_size():
        shape = " x ".join(f"{name} {size}" for name, size in zip(names_of(mesh), mesh.shape, strict=True))
        raise ValueError(
            f"the mesh has {roots.size()} ranks ({shape}), but there are {dist.get_world_size()}: its dimensions must multiply "
            "to the number of ranks"
        )
    if mesh.get_coordinate() is None:
        raise ValueError(f"rank {dist.get_rank()} is not in the mesh: every rank that calls this must be")
    roles_of(mesh)
    for name, param in spread_parameters(model):
        _check_spread(name, param.device_mesh, mesh)  # type: ignore[attr-defined]
    for name, adapter in adapted_layers(model):
        _check_adapter(name, adapter)


def _check_adapter(name: str, adapter: nn.Module) -> None:
    """ValueError for what a library has put around, or in the place of, a layer that is spread, and that is not."""
    layer = adapter._modules.get("base_layer")
    kept = adapter._modules.get("original_module")
    if kept is not None and any(map(is_distributed, kept.parameters())):
        raise ValueError(
            f"modules_to_save with {name}, which is spread over the tensor ranks: the copy would never run, nor be trained. "
            "Leave it out of modules_to_save, or use a mesh without 'tp'"
        )
    own = [is_distributed(param) for path, param in adapter.named_parameters() if not path.startswith("base_layer.")]
    if layer is not None and own and not any(own) and any(map(is_distributed, layer.parameters())):
        raise ValueError(
            f"the adapter of {name} is not spread over the tensor ranks, but the layer is: each rank would train another. "
            "Use LoRA with unwall.parallelize, and peft.get_peft_model after it; other adapters need a mesh without 'tp'"
        )


def adapted_layers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Modules that a library has put around a layer, with weights of their own beside it (PEFT's tuners and copies)."""
    for name, module in model.named_modules():
        if any(isinstance(module._modules.get(kind), nn.Module) for kind in ("base_layer", "original_module")):
            yield name, module


def check_without_mesh(model: nn.Module) -> None:
    """ValueError for a model that needs one."""
    for name, param in spread_parameters(model):
        raise ValueError(
            f"parameter {name} is a DTensor over {describe(param.device_mesh)}: give the mesh that has this dimension and the "  # type: ignore[attr-defined]
            "data-parallel one, unwall.shard(model, plan, mesh)"
        )


def spread_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Those that are DTensors."""
    for name, param in model.named_parameters():
        if is_distributed(param):
            yield name, param


def _check_spread(name: str, its: DeviceMesh, mesh: DeviceMesh) -> None:
    roles, names = roles_of(mesh), names_of(its)
    there = "is over" if its.mesh_dim_names is not None else "is over unnamed dimensions of"
    expected = [dim for dim, role in roles.items() if role == "tensor"]
    if any(dim not in expected for dim in names):
        raise ValueError(
            f"parameter {name} is a DTensor that {there} {describe(its)}, expected: over the tensor-parallel dimension of "
            f"{describe(mesh)}. Use parallelize_module(model, mesh['tp'], ...), or unwall.parallelize(model, mesh); "
            "fully_shard cannot be combined with unwall.shard"
        )
    inside = mesh if names == names_of(mesh) else mesh[names]
    if its.mesh.tolist() != inside.mesh.tolist():
        raise ValueError(
            f"parameter {name} is a DTensor over the ranks {its.mesh.tolist()}, but {describe(mesh)} has "
            f"{inside.mesh.tolist()} along {', '.join(names)}: build one mesh and use it for both"
        )


def describe(mesh: DeviceMesh) -> str:
    """A mesh in words."""
    names = mesh.mesh_dim_names or ("unnamed",) * mesh.ndim
    return "a mesh of " + " x ".join(f"{name} {size}" for name, size in zip(names, mesh.shape, strict=True))


def read_mesh(mesh: DeviceMesh, device: str) -> tuple[Ranks, Others]:
    """The data-parallel ranks, and the others. All ranks of the mesh call it together."""
    roles = roles_of(mesh)
    data, others = Ranks(None, device), Others()
    nodes = node_sizes(mesh)
    for name, role in roles.items():
        if role == "nodes":
            continue  # the ranks of all nodes are data-parallel
        group = mesh.get_group() if mesh.ndim == 1 else mesh.get_group(name)
        if role == "data" and nodes is not None:
            group = everyone_in(mesh[nodes.nodes, name]) if mesh.ndim > 2 else everyone_in(mesh)
        if role != "data" and dist.get_world_size(group) == 1:
            continue
        ranks = Ranks(group, device)
        if ranks.size > 1:
            ranks.control.watch.dimension = f"dimension {name!r} of the mesh"
        if role == "data":
            data = ranks
        elif role == "replicas":
            others.replicas = ranks
        else:
            (others.tensor if role == "tensor" else others.pipeline).append(Dimension(name, ranks))
    if others.beyond or others.replicas is not None:
        others.everyone = Ranks(everyone_in(mesh), device)
    return data, others


class NodeSizes(NamedTuple):
    """The dimensions over nodes and inside a node, and how many ranks a node has."""

    nodes: str
    inside: str
    per_node: int


def node_sizes(mesh: DeviceMesh) -> NodeSizes | None:
    """What a mesh says of nodes, if it does."""
    by_role = {role: name for name, role in roles_of(mesh).items()}
    if "nodes" not in by_role:
        return None
    inside = by_role["data"]
    return NodeSizes(by_role["nodes"], inside, int(mesh.size(names_of(mesh).index(inside))))


def everyone_in(mesh: DeviceMesh) -> "dist.ProcessGroup":
    """The process group of all ranks of a mesh. They call it together."""
    if mesh.size() == dist.get_world_size():
        assert dist.group.WORLD is not None
        return dist.group.WORLD
    group: dist.ProcessGroup = mesh.get_group() if mesh.ndim == 1 else mesh._flatten("unwall").get_group()
    return group


def sizes_of(mesh: DeviceMesh, role: str) -> dict[str, int]:
    """The dimensions for a role that have several ranks, and how many."""
    sizes = dict(zip(names_of(mesh), mesh.shape, strict=True))
    return {name: sizes[name] for name, found in roles_of(mesh).items() if found == role and sizes[name] > 1}
