"""``unwall.plan`` and what the command does with it."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from unwall.planner.candidates import KEPT
from unwall.planner.choose import ChosenPlan, Objective, check_objective, choose, dtype_of
from unwall.planner.description import Description
from unwall.planner.hardware import Hardware, load
from unwall.planner.measure import DTYPES
from unwall.planner.mesh_cost import MeshCost, compare_meshes, paste
from unwall.planner.outline import Outline
from unwall.planner.probe import Progress, probe
from unwall.planner.read import read_model
from unwall.planner.workload import Keeping, check_keeping
from unwall.plans import PlanError
from unwall.tiers.sizes import parse_bytes

NOT_GIVEN = "disk"
"""Stands for a directory on a machine that one does not have."""


def plan(
    model: "nn.Module | Outline | Description | str | Path",
    *,
    batch: int | None = None,
    seq: int = 1024,
    hardware: "Hardware | str | Path | None" = None,
    ranks: int | None = None,
    device_bytes: int | str | None = None,
    host_bytes: int | str | None = None,
    disk_bytes: int | str | None = None,
    disk: str | Path | None = None,
    compute_dtype: torch.dtype | None = None,
    clip: bool = True,
    objective: Objective = "speed",
    vocab: int = 0,
    tiles: int | None = None,
    sequence_tiles: int | None = None,
    activations: Keeping | None = None,
    offload_activations: bool = False,
    compare: bool = False,
    states: str = "exact",
    least_passes: int = 1,
    ignore: Callable[[str, nn.Parameter], bool] | None = None,
    progress: Progress | None = None,
) -> ChosenPlan:
    """The fastest plan that fits, with its prediction and those that lost: ``print`` it, or give it to ``unwall.shard``.

    ``model``: a module (the meta device will do), a Hugging Face ``config.json`` or its directory, ``module:function``, or a
    shape such as ``80x10240``. ``batch``: samples per step, over all ranks; ``seq``: tokens per sample.
    ``hardware``: a name (``"8xh200"``), a file, or None for this machine, which is measured once. Budgets are per rank;
    ``device_bytes`` is for states, gradients and activations together. ``activations``, ``tiles`` and ``sequence_tiles`` are as
    in ``Plan``, which then says so; None: the planner chooses. ``offload_activations`` is ``activations="host"``. ``compare``
    predicts what every choice for activations would take. ``states="lean"``: as in ``Plan``. ``least_passes``: there are so
    many before a step, or a multiple of it. ``ignore``, of a module, is as in ``Plan``: those parameters are counted whole on
    the device, and no states of them.
    PlanError says what would fit where nothing does.
    """
    check_objective(objective)  # before a large model is looked at
    if isinstance(seq, bool) or not isinstance(seq, int) or seq < 1:
        raise PlanError(f"seq must be a whole number above 0, got {seq!r}")
    kept = kept_of(activations, offload_activations)
    for name, value in (("tiles", tiles), ("sequence_tiles", sequence_tiles)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise PlanError(f"{name} must be at least 1, got {value!r}")
    outline = read_model(model, vocab)
    if ignore is not None:
        if not isinstance(model, nn.Module):
            raise PlanError(f"ignore goes by the names of a module's parameters, but the model is {model!r}: give a module")
        outline = dataclasses.replace(outline, ignore=ignore)
    directory = None if disk is None else str(disk)
    machine, ranks = machine_of(hardware, ranks, disk, progress, compute_dtype)
    if directory is None and hardware is not None and machine.disk_bytes:
        directory = NOT_GIVEN
    budgets = {"device_bytes": device_bytes, "host_bytes": host_bytes, "disk_bytes": disk_bytes}
    costs = _meshes(outline, machine, ranks, batch, seq, compute_dtype)
    try:
        found = choose(
            outline, machine, ranks=ranks, batch=batch, seq=seq, clip=clip, directory=directory, compute_dtype=compute_dtype,
            objective=objective, kept=kept, tiles=tiles, sequence_tiles=sequence_tiles, compare=compare, states=states,
            least_passes=least_passes,
            **{name: _bytes(name, value) for name, value in budgets.items()},
        )  # fmt: skip
    except PlanError as error:
        if not costs or costs[0].lack or costs[0].mesh.is_zero_alone or any(budgets.values()):
            raise
        raise type(error)(f"{error}. Another mesh would do: {paste(costs[0])}") from error
    found = dataclasses.replace(found, meshes=costs)
    if disk is None and found.disk is not None:
        found = dataclasses.replace(found, advice=(*found.advice, "set disk= to a directory on the machine's fast drives"))
    return found


def _meshes(
    outline: Outline, machine: Hardware, ranks: int, batch: int | None, seq: int, dtype: torch.dtype | None
) -> tuple[MeshCost, ...]:
    """What other meshes would take. None of the arguments is checked here."""
    usable = isinstance(batch, int) and batch > 0 if batch is not None else True
    if ranks < 2 or ranks != machine.devices or machine.is_host or not usable or outline.ignore is not None:
        return ()
    if not (machine.collective_bytes_per_s or machine.devices_per_node == 1):
        return ()
    return compare_meshes(outline.description, machine, batch or ranks, seq, dtype_of(machine, dtype))


def kept_of(activations: Keeping | None, offload: bool = False) -> tuple[Keeping, ...]:
    """What may become of activations. PlanError for what is not known."""
    if offload and activations not in (None, "host"):
        raise PlanError(f"offload_activations is activations='host', but activations={activations!r} was asked for")
    if activations is not None:
        try:
            check_keeping(activations)
        except ValueError as error:
            raise PlanError(str(error)) from error
    chosen: Keeping | None = "host" if offload else activations
    return KEPT if chosen is None else (chosen,)


def machine_of(
    hardware: "Hardware | str | Path | None",
    ranks: int | None,
    disk: str | Path | None,
    progress: Progress | None = None,
    dtype: torch.dtype | None = None,
) -> tuple[Hardware, int]:
    """The machine and how many ranks use it. This machine: one rank, or those of ``torch.distributed``; it is measured for
    ``dtype``, or for bf16."""
    if hardware is not None:
        machine = hardware if isinstance(hardware, Hardware) else load(hardware)
        return machine, machine.devices if ranks is None else ranks
    machine = probe(disk=disk, progress=progress, dtypes=(dtype if dtype in DTYPES else torch.bfloat16,))
    if ranks is None:
        ranks = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    if 1 <= ranks < machine.devices_per_node:
        machine = machine.with_nodes(1, ranks)
    if ranks > machine.devices_per_node:
        machine = _cut(machine, ranks)
    return machine, ranks


def _cut(machine: Hardware, ranks: int) -> Hardware:
    """A machine without an accelerator, cut into one piece for each rank: memory, cores and all."""
    if not machine.is_host:
        raise PlanError(
            f"{ranks} ranks, but this machine has {machine.devices_per_node} device{'s' * (machine.devices_per_node > 1)}: "
            "describe the machines they run on with hardware="
        )
    rates: dict[str, Any] = {
        name: {dtype: rate / ranks for dtype, rate in getattr(machine, name).items()}
        for name in ("matmul_flops_per_s", "block_flops_per_s")
    }
    return dataclasses.replace(
        machine, devices_per_node=ranks, device_bytes=machine.device_bytes // ranks,
        collective_bytes_per_s=machine.collective_bytes_per_s or machine.host_to_device_bytes_per_s / ranks, **rates,
    )  # fmt: skip


def _bytes(name: str, value: Any) -> int | None:
    if value is None:
        return None
    try:
        found = parse_bytes(int(value) if isinstance(value, str) and value.lstrip("-").isdigit() else value, name)
    except ValueError as error:
        raise PlanError(str(error)) from error
    if found == 0:
        raise PlanError(f"{name} must be greater than zero, got {value!r}")
    return found
