"""The nodes that the ranks of a model are on, where that matters.

[Note: nodes]
A node is a run of ranks with fast links between them: rank ``n`` is on node ``n // per_node``. Two things use that. Parameters
may be kept once more inside each node (shards/replica.py), so that only the first gather after an update crosses between nodes.
And gradients that travel packed are first summed inside the node as they are, so that each of its ranks sends a part of one sum
to the other nodes (shards/two_hops.py).
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

import torch.distributed as dist

if TYPE_CHECKING:
    from unwall.shards.collectives import Ranks


class Nodes:
    """The ranks ``inside`` this rank's node, and those with its place in every node (``across``). See [Note: nodes]."""

    def __init__(self, inside: "Ranks", across: "Ranks") -> None:
        self.inside = inside
        self.across = across

    @property
    def per_node(self) -> int:
        return self.inside.size

    @property
    def count(self) -> int:
        return self.across.size


def per_node_of(node_by_rank: Sequence[int]) -> int:
    """How many neighbouring ranks share a node. ValueError where nodes have unequal numbers, or their ranks are not neighbours.

    ``node_by_rank``: a number for the node of each rank."""
    runs: list[int] = []
    seen: list[int] = []
    for node in node_by_rank:
        if seen and seen[-1] == node:
            runs[-1] += 1
            continue
        if node in seen:
            raise ValueError(f"ranks of one node are not neighbours: rank by rank they are on the nodes {list(node_by_rank)}")
        seen.append(node)
        runs.append(1)
    if len(set(runs)) > 1:
        raise ValueError(f"nodes have unequal numbers of ranks: {runs}")
    return runs[0]


def groups_of(ranks: "Ranks", per_node: int) -> tuple["dist.ProcessGroup", "dist.ProcessGroup"]:
    """Process groups for the ranks inside a node, and for those across nodes. All ranks call it together."""
    whole = ranks.group
    node, place = divmod(ranks.rank, per_node)
    inside = [tuple(range(start, start + per_node)) for start in range(0, ranks.size, per_node)]
    across = [tuple(range(start, ranks.size, per_node)) for start in range(per_node)]
    if ranks.size < dist.get_world_size():
        return _made(whole, inside[node], alone=True), _made(whole, across[place], alone=True)
    # Every rank makes every group, in one order: torch names a group that only its members make by the number of groups they
    # are in, and members with other groups beside it would wait for each other.
    found = [_made(whole, members, alone=False) for members in (*inside, *across)]
    return found[node], found[len(inside) + place]


_groups: dict[tuple["dist.ProcessGroup", tuple[int, ...]], "dist.ProcessGroup"] = {}
"""Made once: each costs threads and sockets."""


def forget_groups() -> None:
    """At the end of the process."""
    _groups.clear()


def _made(whole: "dist.ProcessGroup", members: tuple[int, ...], *, alone: bool) -> "dist.ProcessGroup":
    """``alone``: only the members call it. Otherwise all ranks do, and those that are no members get a placeholder."""
    key = whole, members
    if key not in _groups:
        everywhere = [dist.get_global_rank(whole, rank) for rank in members]
        made = dist.new_group(everywhere, backend=dist.get_backend(whole), use_local_synchronization=alone)
        _groups[key] = cast("dist.ProcessGroup", made)
    return _groups[key]
