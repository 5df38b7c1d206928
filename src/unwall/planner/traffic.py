"""What comes to a rank from the others, group by group, as ``unwall.stats`` counts it.

[Note: hops]
Most collectives are over all ranks of a model. Where the plan knows of nodes ([Note: nodes] in shards/nodes.py), two things are
not: gathers of second copies stay inside the node, and packed gradients take two hops, first inside the node and then between
the ranks at one place of all nodes. Each of these has a rate of its own (``Ceilings``).
"""

import dataclasses
from dataclasses import dataclass

from unwall.planner.formulas import Ceilings
from unwall.planner.hardware import Hardware
from unwall.plans import Plan
from unwall.shards.home import Home, Sizes, replica_bytes_on
from unwall.shards.working import transit_bytes_of


@dataclass(frozen=True)
class Traffic:
    """Bytes from other ranks, by the ranks that take part. See [Note: hops]."""

    everyone: float = 0.0
    """In collectives over all ranks."""
    near: float = 0.0
    """In those over the ranks of a node."""
    across: float = 0.0
    """In those over the ranks at one place of all nodes."""

    def __add__(self, other: "Traffic") -> "Traffic":
        return Traffic(self.everyone + other.everyone, self.near + other.near, self.across + other.across)

    def __mul__(self, times: float) -> "Traffic":
        return Traffic(times * self.everyone, times * self.near, times * self.across)

    @property
    def total(self) -> float:
        return self.everyone + self.near + self.across

    def between_s(self, rates: Ceilings) -> float:
        """Seconds of what is not inside a node."""
        return _seconds(self.everyone, rates.collective_bytes_per_s) + _seconds(self.across, rates.across_bytes_per_s)

    def near_s(self, rates: Ceilings) -> float:
        return _seconds(self.near, rates.near_bytes_per_s)


def _seconds(nbytes: float, rate: float) -> float:
    return nbytes / rate if nbytes else 0.0


def with_nodes(plan: Plan, hardware: Hardware, ranks: int) -> Plan:
    """The plan with ``node_ranks`` filled in where ``shard`` would ask the launcher (``find_nodes`` in parallel/nodes.py)."""
    if plan.replica is None or plan.node_ranks is not None or ranks == 1:
        return plan
    return dataclasses.replace(plan, node_ranks=min(hardware.devices_per_node, ranks))


def ranks_per_node(plan: Plan, ranks: int) -> int:
    """As the engine has it: 1 where nodes are not known, or there is one."""
    known = plan.node_ranks is not None and 1 < plan.node_ranks < ranks
    return plan.node_ranks if known and plan.node_ranks is not None else 1


def has_replica(size: Sizes, home: Home) -> bool:
    """Whether a group has a second copy inside the node."""
    return replica_bytes_on(home.replica, size, home) > 0


def takes_two_hops(size: Sizes, plan: Plan, ranks: int) -> bool:
    """Whether a group's gradient is summed inside the node first."""
    return bool(size.exchange_bytes) and ranks_per_node(plan, ranks) > 1 and not plan.reduce_feedback


def of_gather(size: Sizes, home: Home, ranks: int) -> Traffic:
    """One gather over all ranks."""
    return Traffic(everyone=_others(transit_bytes_of(size, home) or size.flat_bytes, ranks))


def of_near_gather(size: Sizes, plan: Plan, ranks: int) -> Traffic:
    """One gather of a second copy."""
    return Traffic(near=_others(size.flat_bytes, ranks_per_node(plan, ranks)))


def of_reduction(size: Sizes, plan: Plan, ranks: int) -> Traffic:
    """One sum of a gradient. At stage 0 the sums are then gathered as they are."""
    again = _others(size.grad_flat_bytes, ranks) if plan.stage == 0 else 0.0
    if not takes_two_hops(size, plan, ranks):
        return Traffic(everyone=again + _others(size.exchange_bytes or size.grad_flat_bytes, ranks))
    inside = ranks_per_node(plan, ranks)
    return Traffic(again, _others(size.grad_flat_bytes, inside), _others(size.exchange_bytes, ranks // inside))


def _others(nbytes: float, ranks: int) -> float:
    """What of it is other ranks'."""
    return nbytes * (ranks - 1) / ranks
