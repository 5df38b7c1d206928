"""Sums of packed gradients over nodes: inside each node as they are, between nodes as small integers.

[Note: two hops]
With R ranks on each of M nodes, rank ``n`` is at place ``n % R`` of node ``n // R``. First the ranks of a node sum what all of
them have for the ranks at one place, in the gradients' own dtype. So each holds 1/R of the node's sum: the shards of the ranks
at its own place, one per node. Then these ranks exchange them packed, and add up M of them in fp32 and in the order of the
nodes. Between nodes each rank gets (M - 1) / M of 1/R of the gradient instead of all of it, and rounding adds noise M times
instead of N times.

With feedback ([Note: feedback] in shards/packed_reduce.py) gradients travel in one hop: what rounding leaves of a node's sum
belongs to no rank's own gradient.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from unwall.shards.accumulate import Accumulator
from unwall.shards.collectives import Collective
from unwall.shards.compress import seed_of
from unwall.shards.nodes import Nodes
from unwall.shards.packed_reduce import PackedReducer
from unwall.shards.reduce import Memory, Reduction
from unwall.tiers.block import MemoryBlock


@dataclass(frozen=True, kw_only=True)
class TwoHopReducer(PackedReducer):
    """See [Note: two hops]."""

    nodes: Nodes

    @property
    def nbytes(self) -> int:
        return super().nbytes + self._node_sum_numel * self.dtype.itemsize

    @property
    def _packed_bytes(self) -> int:
        """What is sent to the other nodes, and what comes from them."""
        return self.codec.packed_bytes(self.group.layout.shard_numel) * self.nodes.count

    @property
    def _node_sum_numel(self) -> int:
        return self.group.layout.shard_numel * self.nodes.count

    def collectives(self, memory: Memory) -> list[Callable[[], Collective]]:
        shard = self.group.layout.shard_numel

        def inside() -> Collective:
            whole, part = memory(shard * self.nodes.per_node, shard, self.dtype)
            return self.nodes.inside.reduce_scatter(part, whole)

        def across() -> Collective:
            whole, part = memory(self._packed_bytes, self._packed_bytes, torch.uint8)
            return self.nodes.across.exchange(part, whole)

        return [inside] * self.nodes.count + [across] + self._gathering(memory)

    def _begin(self, own: Accumulator | None, taken: list[MemoryBlock]) -> Reduction:
        layout = self.group.layout
        incoming = self._allocate(layout.shard_numel, taken)
        whole = self._allocate(layout.padded_numel, taken) if self.everywhere else None
        summed = self._allocate(self._node_sum_numel, taken)
        label = f"gradients of {self.group.name} on their way"
        blocks = [self.device.allocate(self._packed_bytes, label) for _ in range(2)]
        taken += blocks
        flat = self._allocate(layout.padded_numel, taken) if own is None else own.complete()
        if own is None:
            flat.data.zero_()
        halves = self.mean and self.dtype is torch.float16  # divided before the sum: fp16 overflows early
        if halves:
            flat.view(self.dtype).div_(self.nodes.per_node)
        reduction = Reduction(self.device, self.dtype, incoming, flat, served=own is None)
        try:
            self._sum_inside(flat.view(self.dtype), summed.view(self.dtype))
            reduction.work = self._send_across(summed.view(self.dtype), incoming.view(self.dtype), blocks, halves)
        except BaseException:
            if halves:
                flat.view(self.dtype).mul_(self.nodes.per_node)
            raise
        self._count_hops()
        self.device.free(summed)
        for block in (*blocks, summed):  # the former go when the sum is there
            taken.remove(block)
        if whole is not None:
            self._gather(reduction, whole)
            self.device.free(incoming)
        return reduction

    def _sum_inside(self, flat: torch.Tensor, summed: torch.Tensor) -> None:
        """The first hop, which is over when this returns."""
        shard, per_node = self.group.layout.shard_numel, self.nodes.per_node
        parts = zip(summed.split(shard), flat.split(shard * per_node), strict=True)
        for work in [self.nodes.inside.reduce_scatter(part, whole) for part, whole in parts]:
            work.wait()

    def _send_across(self, summed: torch.Tensor, total: torch.Tensor, blocks: list[MemoryBlock], halves: bool) -> Collective:
        """The second one."""
        received, sent = (block.view(torch.uint8) for block in blocks)
        seed = seed_of(self.ranks.steps, self.rounds.next(self.ranks.steps), self.group.index, self.ranks.rank)
        self.codec.pack(sent, summed, self.nodes.count, seed)
        divisor = 1 if not self.mean else self.nodes.count if halves else self.ranks.size

        def add() -> None:
            self.codec.add(total, received, self.nodes.count, divisor)
            for block in blocks:
                self.device.free(block)

        return self.nodes.across.exchange(received, sent, add)

    def _count_hops(self) -> None:
        traffic, far = self.ranks.traffic, self.nodes.across.from_others(self._packed_bytes)
        near = self.nodes.inside.from_others(self.group.layout.padded_numel * self.dtype.itemsize)
        traffic.reduced_bytes += near + far
        traffic.reduced_far_bytes += far
