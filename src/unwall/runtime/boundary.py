"""Where a module call's backward ends: the autograd nodes that hand gradients to the call's inputs."""

from collections.abc import Iterable
from typing import Any

import torch
from torch.autograd.graph import Node

_NODES_MAX = 4096
_LEAF: Any = torch._C._functions.AccumulateGrad  # type: ignore[attr-defined]
"""The node of a parameter: nothing comes behind it."""


def boundary_nodes(outputs: Iterable[torch.Tensor], inputs: Iterable[torch.Tensor]) -> list[Node] | None:
    """Nodes between ``outputs`` and ``inputs`` with an edge straight into an input. Once all of them have run, the inputs'
    gradients from this call are out, and the call's parameters are read no more. None where the graph is too large to walk.
    """
    goals = set()
    for tensor in inputs:
        if tensor.requires_grad:
            goals.add(tensor.grad_fn if tensor.grad_fn is not None else torch.autograd.graph.get_gradient_edge(tensor).node)
    found: list[Node] = []
    stack = [node for node in {tensor.grad_fn for tensor in outputs} if node is not None and node not in goals]
    seen: set[Node] = set(stack)  # an output may be an input
    while stack:
        if len(seen) > _NODES_MAX:
            return None
        node = stack.pop()
        reaches = False
        for entry, _ in node.next_functions:
            if entry in goals:
                reaches = True
            elif entry is not None and entry not in seen:
                seen.add(entry)
                if type(entry) is not _LEAF:
                    stack.append(entry)
        if reaches:
            found.append(node)
    return found
