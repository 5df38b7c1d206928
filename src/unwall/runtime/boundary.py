"""Where a module call's backward ends: the autograd nodes that hand gradients to the call's inputs."""

from collections.abc import Iterable

import torch
from torch.autograd.graph import Node

_NODES_MAX = 4096


def boundary_nodes(outputs: Iterable[torch.Tensor], inputs: Iterable[torch.Tensor]) -> list[Node] | None:
    """Nodes between ``outputs`` and ``inputs`` with an edge straight into an input. Once all of them have run, the inputs'
    gradients from this call are out, and the call's parameters are read no more. None where the graph is too large to walk.
    """
    goals = set()
    for tensor in inputs:
        if tensor.requires_grad:
            goals.add(tensor.grad_fn if tensor.grad_fn is not None else torch.autograd.graph.get_gradient_edge(tensor).node)
    found: list[Node] = []
    seen: set[Node] = set()
    stack = [tensor.grad_fn for tensor in outputs if tensor.grad_fn is not None]
    while stack:
        node = stack.pop()
        if node in seen or node in goals:  # an output may be an input
            continue
        seen.add(node)
        if len(seen) > _NODES_MAX:
            return None
        reaches = False
        for entry, _ in node.next_functions:
            if entry in goals:
                reaches = True
            elif entry is not None and entry not in seen:
                stack.append(entry)
        if reaches:
            found.append(node)
    return found
