"""Which ranks of a model are on one node: as its mesh says, its plan, or the launcher."""

import os
from dataclasses import replace

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from unwall.parallel.mesh import describe, node_sizes
from unwall.plans import Plan, PlanError
from unwall.shards.collectives import Ranks
from unwall.shards.nodes import per_node_of


def find_nodes(plan: Plan, ranks: Ranks, mesh: DeviceMesh | None) -> Plan:
    """Tells the ranks where they are, if that matters, and gives the plan with ``node_ranks`` filled in. All ranks call it.

    PlanError where nothing says what the nodes are, or what is said cannot be."""
    meshed = None if mesh is None else node_sizes(mesh)
    if ranks.size == 1 or (plan.replica is None and plan.node_ranks is None and meshed is None):
        return plan
    per_node = _in_mesh(plan, mesh) if mesh is not None and meshed is not None else _outside_of_meshes(plan, ranks)
    said = ranks.every(per_node)
    if len(set(said)) > 1:
        raise PlanError(f"the ranks have other numbers of ranks per node: {said}. Give node_ranks=..., the same on all of them")
    if plan.replica is not None and per_node == 1:
        raise PlanError(
            "replica='node' with one rank per node: its second copy would be the whole model. Use Plan(stage=2), which keeps "
            "the parameters whole on every rank"
        )
    made = None if mesh is None or meshed is None else (mesh.get_group(meshed.inside), mesh.get_group(meshed.nodes))
    ranks.know_nodes(per_node, made)
    return replace(plan, node_ranks=per_node)


def _in_mesh(plan: Plan, mesh: DeviceMesh) -> int:
    found = node_sizes(mesh)
    assert found is not None
    if plan.node_ranks not in (None, found.per_node):
        raise PlanError(
            f"node_ranks={plan.node_ranks}, but {describe(mesh)} has {found.per_node} ranks per node: leave node_ranks out"
        )
    return found.per_node


def _outside_of_meshes(plan: Plan, ranks: Ranks) -> int:
    if plan.node_ranks is not None:
        if plan.node_ranks < ranks.size and ranks.size % plan.node_ranks:
            raise PlanError(
                f"node_ranks={plan.node_ranks}, but the model is cut over {ranks.size} ranks, which is no multiple of that"
            )
        return min(plan.node_ranks, ranks.size)
    local = os.environ.get("LOCAL_WORLD_SIZE", "")
    every: list[tuple[int, str]] = ranks.every((dist.get_rank(), local))
    if any(not said.isdigit() or int(said) < 1 for _, said in every):
        raise PlanError(
            f"replica='node', and nothing says how many ranks a node has (LOCAL_WORLD_SIZE is {local!r} here): start with "
            "torchrun, give Plan(node_ranks=...), or a mesh with a dimension 'node' before 'dp'"
        )
    if len({said for _, said in every}) > 1:
        raise PlanError(
            f"nodes have unequal numbers of ranks (LOCAL_WORLD_SIZE by rank: {', '.join(said for _, said in every)}), and "
            "second copies need equal ones: leave replica='node' out"
        )
    try:
        return per_node_of([rank // int(said) for rank, said in every])
    except ValueError as error:
        raise PlanError(f"replica='node': {error}. Give a mesh with a dimension 'node' before 'dp'") from error
