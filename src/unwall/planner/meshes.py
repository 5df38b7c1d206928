"""Meshes of ranks: which ways there are to spread a model over machines, and how one writes them."""

from collections.abc import Iterator
from dataclasses import dataclass

from unwall.planner.hardware import Hardware


@dataclass(frozen=True)
class Mesh:
    """Ranks in dimensions, the last one next to each other: ``pp``, ``dp`` (replicas of shards), ``tp``."""

    pp: int = 1
    replicas: int = 1
    shards: int = 1
    """Ranks that each keep a part of the states."""
    tp: int = 1

    @property
    def dp(self) -> int:
        """Ranks that see different samples."""
        return self.replicas * self.shards

    @property
    def ranks(self) -> int:
        return self.pp * self.dp * self.tp

    @property
    def is_zero_alone(self) -> bool:
        return self.pp == self.tp == self.replicas == 1

    def dimensions(self) -> dict[str, int]:
        """Names and sizes, as ``unwall.shard`` reads them; those of one rank are left out."""
        named = {"pp": self.pp, "dp_replicate": self.replicas, "dp_shard": self.shards, "tp": self.tp}
        if self.replicas == 1:
            named = {"pp": self.pp, "dp": self.shards, "tp": self.tp}
        found = {name: size for name, size in named.items() if size > 1}
        return found or {"dp": 1}

    def code(self) -> str:
        """The line to paste."""
        found = self.dimensions()
        sizes = ", ".join(map(str, found.values())) + ("," if len(found) == 1 else "")
        names = ", ".join(f'"{name}"' for name in found) + ("," if len(found) == 1 else "")
        return f'mesh = init_device_mesh("cuda", ({sizes}), mesh_dim_names=({names}))'

    def __str__(self) -> str:
        if self.is_zero_alone:
            return f"ZeRO alone (dp {self.shards})"
        return " x ".join(f"{name} {size}" for name, size in self.dimensions().items())

    def spread(self, hardware: Hardware) -> tuple[int, int]:
        """(ranks of a data-parallel group that share a node, groups that share its network): dimensions fill nodes from the
        last one."""
        inside = max(1, min(self.dp, hardware.devices_per_node // self.tp))
        return inside, max(1, hardware.devices_per_node // inside)


def meshes(hardware: Hardware, blocks: int, batch: int) -> Iterator[Mesh]:
    """Tensor ranks inside a node, pipeline stages of at least a block, and a sample for each data-parallel rank. Replicas of
    shards: one per node."""
    ranks, node = hardware.devices, hardware.devices_per_node
    for tp in (size for size in range(1, node + 1) if node % size == 0 and size & (size - 1) == 0):
        for pp in (size for size in range(1, min(blocks, ranks // tp) + 1) if ranks // tp % size == 0):
            if pp & (pp - 1) and pp != hardware.nodes:
                continue
            dp = ranks // tp // pp
            if batch % dp:
                continue
            yield Mesh(pp, 1, dp, tp)
            inside = max(1, min(dp, node // tp))
            if 1 < inside < dp and dp % inside == 0:
                yield Mesh(pp, dp // inside, inside, tp)
