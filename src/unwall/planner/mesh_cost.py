"""What a step costs on a mesh, by a simple model: bytes per link over its rate, and what hides behind what.

[Note: cost of a mesh]
``Psi`` is what one rank computes with: the parameters over pp and tp. Everything is per rank and step; bytes of bf16.

- Compute: the batch's FLOPs (a forward more where activations are recomputed) over all ranks, at the rate of a block.
- ``tp``: two all-reduces per layer forward and two backward (two more where forward is repeated) of a pass's tokens times the
  hidden size, each 2 (tp - 1) / tp of that on the node's links. Nothing is computed meanwhile.
- ``dp``: gathers and reductions of Psi, each (n - 1) / n of it. Where Psi has room on the device it is gathered once per step,
  otherwise twice per pass, which is ZeRO's 3 Psi. A pass reduces once; a pipeline with room once per step. Groups over nodes
  share each node's network. All of that hides behind compute.
- Replicas: each rank gets the gradients of its shard from all others, in fp32, once per step and over the network. That is done
  when the step begins ([Note: replicas] in runtime/replicas.py), so nothing hides it.
- ``pp``: of m microbatches of one sample, (pp - 1) / m of the step's compute is waited for (1F1B). Activations go to the next
  stage and their gradients back; that hides, too.
- States that do not fit on the device are on the host: there and back over the host link, hidden; and the update, which is not.

Left out: latency, and that a slice of a matrix computes less efficiently than the whole. What fits is counted as ZeRO counts:
16 bytes per parameter, two blocks gathered with their gradients, activations kept if they fit, else recomputed.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from unwall.planner.candidates import DEVICE_SHARE
from unwall.planner.description import Description
from unwall.planner.formulas import SPLIT_UPDATE_TRAFFIC_BYTES, zero_state_bytes
from unwall.planner.hardware import Hardware
from unwall.planner.meshes import Mesh, meshes
from unwall.planner.pace import dtype_name
from unwall.planner.words import seconds
from unwall.runtime.resources import HOST_SHARE
from unwall.tiers.sizes import format_bytes

SIMPLER = 1.05
"""ZeRO alone needs no change to a model: another mesh must be faster than that."""
WHOLE_NORMS = 4
"""Numbers per token, in hidden sizes, that each tensor rank has of a block: inputs and outputs of its two norms."""


@dataclass(frozen=True, kw_only=True)
class MeshCost:
    """One mesh, as the model of [Note: cost of a mesh] sees it."""

    mesh: Mesh
    passes: int
    """Of a data-parallel rank; microbatches, where there is a pipeline."""
    recompute: bool
    on_host: bool
    """States do not fit on the device."""
    device_bytes: float
    compute_s: float
    tensor_s: float
    """All-reduces of the tensor ranks."""
    data_s: float
    """Gathers and reductions; hidden as far as compute goes."""
    replica_s: float
    """Gradients of the other replicas; nothing hides them."""
    pipe_s: float
    """Activations between stages; hidden as gathers are."""
    bubble_s: float
    host_s: float
    """The host link; hidden, too."""
    update_s: float
    lack: str = ""
    """Why it does not fit."""

    @property
    def step_s(self) -> float:
        at_work = max(self.compute_s + self.tensor_s, self.data_s, self.pipe_s, self.host_s)
        return at_work + self.bubble_s + self.replica_s + self.update_s

    def plan_code(self) -> str:
        """The plan that goes with the mesh."""
        placed = ", params='host', optimizer='host'" if self.on_host else ""
        kept = "recompute" if self.recompute else "keep"
        return f"unwall.Plan(stage=3{placed}, activations='{kept}', passes={1 if self.mesh.pp > 1 else self.passes})"

    def terms(self) -> dict[str, float]:
        """Seconds, by what takes them."""
        named = {
            "compute": self.compute_s, "tp all-reduces": self.tensor_s, "ZeRO's gathers and reductions": self.data_s,
            "between replicas": self.replica_s, "between stages": self.pipe_s, "bubble": self.bubble_s,
            "host link": self.host_s, "update": self.update_s,
        }  # fmt: skip
        return {name: value for name, value in named.items() if value}


def cost_of(mesh: Mesh, described: Description, hardware: Hardware, batch: int, seq: int, dtype: torch.dtype) -> MeshCost:
    """The fastest way to run a batch on a mesh; where none fits, ``lack`` says what is missing."""
    samples = batch // mesh.dp
    passes = [samples] if mesh.pp > 1 else [count for count in range(1, samples + 1) if samples % count == 0]
    found = [
        _cost(mesh, described, hardware, (batch, seq, count), dtype, recompute, on_host)
        for count in passes
        for recompute in (False, True)
        for on_host in (False, True)
    ]
    fitting = [each for each in found if not each.lack]
    return min(fitting, key=lambda each: each.step_s) if fitting else min(found, key=lambda each: each.device_bytes)


def _cost(
    mesh: Mesh, described: Description, hardware: Hardware, load: tuple[int, int, int], dtype: torch.dtype, recompute: bool,
    on_host: bool,
) -> MeshCost:  # fmt: skip
    batch, seq, passes = load
    item, name = dtype.itemsize, dtype_name(dtype)
    psi = described.params / (mesh.pp * mesh.tp)
    samples = batch / mesh.dp / passes
    tokens = samples * seq
    hidden = max((part.boundary_numel for part in described.parts), default=0)
    layers = described.blocks / mesh.pp
    device, room = _device_bytes(mesh, described, hardware, samples, seq, item, recompute, on_host)
    gathers = 1 if room >= item * psi else 2 * passes
    reduces = 1 if mesh.pp > 1 and gathers == 1 else passes
    rates = hardware.ceilings(name)
    link = hardware.collective_bytes_per_s or float("inf")
    tensor = 0.0
    if mesh.tp > 1:
        calls = (6 if recompute else 4) * layers * passes
        tensor = calls * 2 * (mesh.tp - 1) / mesh.tp * tokens * hidden * item / link
    compute = described.flops(batch, seq, recompute) / mesh.ranks / hardware.block_rate(name)
    shard = psi / mesh.shards
    host = 3 * item * shard / rates.host_to_device_bytes_per_s if on_host else 0.0
    update = SPLIT_UPDATE_TRAFFIC_BYTES * shard / rates.host_memory_bytes_per_s if on_host else 0.0
    pipe = 0.0
    if mesh.pp > 1:
        stage_in_node = mesh.dp * mesh.tp < hardware.devices_per_node
        between = link if stage_in_node else hardware.network_bytes_per_s / hardware.devices_per_node
        pipe = 2 * passes * tokens * hidden * item / between
    cost = MeshCost(
        mesh=mesh, passes=passes, recompute=recompute, on_host=on_host, device_bytes=device, compute_s=compute, tensor_s=tensor,
        data_s=_data_s(mesh, hardware, item * psi, gathers + reduces), replica_s=_replica_s(mesh, hardware, shard, item),
        pipe_s=pipe,
        bubble_s=(mesh.pp - 1) / passes * (compute + tensor) if mesh.pp > 1 else 0.0, host_s=host, update_s=update,
    )  # fmt: skip
    lack = _lack(cost, hardware, zero_state_bytes(shard, 1, 3))
    return replace(cost, lack=lack) if lack else cost


def _data_s(mesh: Mesh, hardware: Hardware, psi_bytes: float, times: int) -> float:
    """Gathers and reductions over the shards."""
    inside, groups = mesh.spread(hardware)
    link = hardware.collective_bytes_per_s or float("inf")
    network = hardware.network_bytes_per_s / groups if hardware.nodes > 1 else float("inf")
    rate = link if mesh.shards <= inside else min(link, network)
    return times * (mesh.shards - 1) / mesh.shards * psi_bytes / rate


def _replica_s(mesh: Mesh, hardware: Hardware, shard_numel: float, item: int) -> float:
    """What each rank gets of the other replicas' gradients. Every rank of the node has a shard to exchange."""
    if mesh.replicas == 1:
        return 0.0
    link = hardware.collective_bytes_per_s or float("inf")
    apart = hardware.network_bytes_per_s / hardware.devices_per_node if hardware.nodes > 1 else link
    return (mesh.replicas - 1) * max(item, 4) * shard_numel / apart


def _device_bytes(
    mesh: Mesh, described: Description, hardware: Hardware, samples: float, seq: int, item: int, recompute: bool, on_host: bool
) -> tuple[float, float]:
    """What one rank holds at most, and what is left of its device."""
    psi = described.params / (mesh.pp * mesh.tp)
    states = 0.0 if on_host else zero_state_bytes(psi, mesh.shards, 3)
    largest = max((part.numel for part in described.parts if part.is_block), default=described.params)
    working = 4 * item * largest / mesh.tp
    tokens, in_flight = item * samples * seq, mesh.pp  # microbatches whose backward is still to come, on the first stage
    kept = inputs = most = 0.0
    beside = 0.0
    for part in described.parts:
        whole = min(part.token_numel, WHOLE_NORMS * part.boundary_numel)
        each = tokens * (whole + (part.token_numel - whole + part.pair_numel * seq) / mesh.tp)
        if part.is_block:
            kept += part.count * each
            inputs += part.count * tokens * part.boundary_numel
            most = max(most, each)
        else:
            beside += tokens * part.token_numel
    held = inputs / mesh.pp * in_flight + max(most, beside) if recompute else kept / mesh.pp * in_flight + beside
    total = states + working + held
    return total, DEVICE_SHARE * hardware.device_bytes - total


def _lack(cost: MeshCost, hardware: Hardware, state_bytes: float) -> str:
    there = DEVICE_SHARE * hardware.device_bytes
    if cost.device_bytes > there:
        return f"needs {format_bytes(int(cost.device_bytes))} on the device, there are {format_bytes(int(there))}"
    host = HOST_SHARE * hardware.host_bytes / hardware.devices_per_node
    if cost.on_host and state_bytes > host:
        return f"needs {format_bytes(int(state_bytes))} on the host, there are {format_bytes(int(host))} per rank"
    return ""


def compare_meshes(
    described: Description, hardware: Hardware, batch: int, seq: int, dtype: torch.dtype
) -> tuple[MeshCost, ...]:
    """All meshes, the best first: the fastest that fits, unless ZeRO alone is nearly as fast."""
    found = [cost_of(mesh, described, hardware, batch, seq, dtype) for mesh in meshes(hardware, described.blocks, batch)]
    found.sort(key=lambda each: (bool(each.lack), each.step_s))
    zero = next((each for each in found if each.mesh.is_zero_alone and not each.lack), None)
    if zero is not None and zero.step_s <= SIMPLER * found[0].step_s:
        found = [zero, *(each for each in found if each is not zero)]
    return tuple(found)


def paste(cost: MeshCost) -> str:
    """The mesh and its plan, as one writes them."""
    made = (
        f"part, schedule = unwall.pipeline(model, plan, mesh=mesh, microbatches={cost.passes}, loss=loss)"
        if cost.mesh.pp > 1
        else "unwall.shard(model, plan, mesh)"
    )
    spread = "unwall.parallelize(model, mesh); " if cost.mesh.tp > 1 else ""
    return f"{cost.mesh.code()}; plan = {cost.plan_code()}; {spread}{made}"


def mesh_lines(found: Sequence[MeshCost]) -> list[str]:
    """Which mesh wins and why, and the lines to paste where it is not ZeRO alone."""
    if len(found) < 2:
        return []
    best = found[0]
    lines = [f"mesh: {best.mesh}, {seconds(best.step_s)} per step by link bytes alone: {why(found)}"]
    return lines if best.mesh.is_zero_alone else [*lines, paste(best)]


def why(found: Sequence[MeshCost]) -> str:
    """Why the first one is the first."""
    best, others = found[0], found[1:]
    if best.lack:
        return f"no mesh fits: {best.mesh} {best.lack}"
    if not others:
        return "there is no other"
    if best.mesh.is_zero_alone:
        second = others[0]
        hidden = "hide behind" if best.data_s <= best.compute_s else "are not hidden by"
        said = f"gathers and reductions ({seconds(best.data_s)}) {hidden} compute ({seconds(best.compute_s)})"
        return f"{said}; next {second.mesh}: {second.lack or f'{seconds(second.step_s)}, {_extra(second)}'}"
    zero = next((each for each in others if each.mesh.is_zero_alone), None)
    if zero is None:
        return f"ZeRO alone wants a sample for each of {best.mesh.ranks} ranks; {_extra(best)}"
    if zero.lack:
        return f"ZeRO alone {zero.lack}"
    return f"ZeRO alone takes {seconds(zero.step_s)}, {_extra(zero)}; here it is {_extra(best)}"


def _extra(cost: MeshCost) -> str:
    """What a step takes, in words, the longest first."""
    listed = sorted(cost.terms().items(), key=lambda item: -item[1])[:3]
    return ", ".join(f"{name} {seconds(value)}" for name, value in listed)
