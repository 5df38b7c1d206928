"""The public functions."""

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from unwall.checkpoint.agree import agree
from unwall.checkpoint.load_weights import load_waiting, load_weights
from unwall.checkpoint.public import StrPath
from unwall.optim.guard import guard_plain_optimizers
from unwall.parallel.alike import check_alike
from unwall.parallel.given import check_model, check_plan, check_replicas, device_of, process_group
from unwall.parallel.mesh import check_mesh, check_without_mesh, describe, everyone_in, read_mesh, roles_of, sizes_of
from unwall.parallel.nodes import find_nodes
from unwall.parallel.options import pipeline_options
from unwall.parallel.peers import Peers
from unwall.parallel.tensor import parallelize
from unwall.parallel.values import start_value
from unwall.plans import Plan, PlanError
from unwall.report.timeline import Profile
from unwall.runtime.activations import arrange_activations
from unwall.runtime.assemble import assemble
from unwall.runtime.engine import Engine
from unwall.runtime.hooks import engine_of
from unwall.runtime.init import Pager, building, paged_bytes
from unwall.runtime.live import forget_interrupted
from unwall.runtime.meta_buffers import fill_meta_buffers
from unwall.runtime.move import move_states
from unwall.runtime.newcomers import take_in, watch
from unwall.runtime.resources import open_tiers, room_on
from unwall.runtime.shelf import Shelf
from unwall.runtime.stats import Stats, read_stats
from unwall.runtime.whole import lend
from unwall.shards.build import smallest
from unwall.shards.collectives import Ranks
from unwall.tiers.device import DeviceTier, default_device
from unwall.tiers.host import available_bytes, local_ranks

if TYPE_CHECKING:
    from unwall.planner.choose import ChosenPlan
    from unwall.planner.hardware import Hardware


def shard(model: nn.Module, plan: Plan | None = None, mesh: DeviceMesh | None = None) -> nn.Module:
    """Partitions a model in place and returns it. ``plan=None`` leaves every choice to unwall.

    One process needs nothing else. With ``torchrun`` the model is cut over the default process group, or over the
    data-parallel dimension of ``mesh`` (``dp``; ``dp_shard`` with ``dp_replicate``). Its parameters may be spread over the
    mesh's ``tp`` dimension already (``unwall.parallelize``, or torch's ``parallelize_module``). All data-parallel ranks start
    from rank 0's values.
    """
    plan = Plan() if plan is None else plan
    check_plan(plan)
    if building():
        raise RuntimeError("unwall.shard inside unwall.init: leave the init context first, the model's values are still paged")
    check_model(model)
    if plan.partition_activations and (mesh is None or "tensor" not in roles_of(mesh).values()):
        where = "without a mesh" if mesh is None else f"over {describe(mesh)}"
        raise PlanError(f"partition_activations=True {where}: it needs a tensor-parallel dimension, 'tp'")
    if mesh is None:
        check_without_mesh(model)
    else:
        check_mesh(mesh, model)
        check_replicas(plan, mesh)
    unwritten: dict[object, str] = {id(param): name for name, param in model.named_parameters() if param.is_meta}
    unwritten |= fill_meta_buffers(model)
    forget_interrupted()
    device = DeviceTier(device_of(model, mesh), plan.budget_device_bytes, arenas=plan.arenas)
    ranks, others = (Ranks(process_group(), device.device.type), None) if mesh is None else read_mesh(mesh, device.device.type)
    check_alike(plan, ranks, others)
    plan = find_nodes(plan, ranks, mesh)
    room = smallest(ranks.every(room_on(device.device, plan, paged_bytes(model))))
    number = ranks.rank if others is None or others.everyone is None else others.everyone.rank
    tiers = partial(open_tiers, plan, device, number)
    made = assemble(model, plan, ranks, room, tiers, partial(start_value, others), others=others)
    made.unwritten |= unwritten
    arrange_activations(made, model)
    watch(made)
    if others is not None and others.everyone is not None and mesh is not None:
        others.peers = Peers(made, mesh)
    guard_plain_optimizers()
    load_waiting(model)
    model.__dict__["_is_accelerate_prepared"] = True  # Accelerate puts no DDP or autocast around it
    return model


def pipeline(
    model: nn.Module,
    plan: Plan | None = None,
    *,
    mesh: DeviceMesh,
    microbatches: int,
    loss: Callable[..., torch.Tensor] | None = None,
    schedule: str = "1F1B",
    split: Sequence[int] | None = None,
) -> tuple[nn.Module, Any]:
    """Cuts a model over the ``pp`` dimension of a mesh, and shards each rank's part over the others.

    Gives ``part, schedule``: what this rank holds of the model, sharded (for the optimizer and ``state_dict``, under the names
    of the whole model), and torch's own schedule. Every rank calls ``schedule.step(...)``, those of the first stage with the
    inputs and those of the last one with ``target=`` and ``losses=[]``; then ``optimizer.step()``. A batch is cut into
    ``microbatches``; ``loss(output, target)`` is of one of them, and gradients are averaged over them.

    ``schedule``: GPipe, 1F1B, Interleaved1F1B, LoopedBFS, ZBVZeroBubble, InterleavedZeroBubble or DualPipeV. ``split``: how
    many layers each stage runs, by default balanced by their cost. The model is an ``nn.Sequential`` or a decoder of
    ``transformers``, built alike on every rank (whole, or on the meta device); under tensor parallelism it is spread before.
    """
    from unwall.parallel.pipeline import pipeline as cut  # torch's pipelining takes long to import

    plan = Plan() if plan is None else plan
    check_plan(plan)
    return cut(model, lambda part: shard(part, plan, mesh), engine, mesh, microbatches, loss, schedule, split)


@overload
def from_pretrained(
    path: StrPath,
    plan: Plan | None = ...,
    mesh: DeviceMesh | None = ...,
    auto_class: Any = ...,
    dtype: Any = ...,
    *,
    microbatches: None = None,
    **overrides: Any,
) -> nn.Module: ...


@overload
def from_pretrained(
    path: StrPath,
    plan: Plan | None = ...,
    mesh: DeviceMesh | None = ...,
    auto_class: Any = ...,
    dtype: Any = ...,
    *,
    microbatches: int,
    **overrides: Any,
) -> tuple[nn.Module, Any]: ...


def from_pretrained(
    path: StrPath,
    plan: Plan | None = None,
    mesh: DeviceMesh | None = None,
    auto_class: Any = None,
    dtype: torch.dtype | str | None = None,
    *,
    microbatches: int | None = None,
    **overrides: Any,
) -> nn.Module | tuple[nn.Module, Any]:
    """A sharded model from a directory that ``save_pretrained`` of ``transformers`` wrote. It never exists whole.

    ``auto_class``: ``AutoModelForCausalLM`` and the like, or a model's class; by default the class that wrote the directory.
    ``dtype``: what the parameters are in, by default what the config says. ``overrides`` are fields of the config. What the
    files do not hold is initialised, with a warning. As in ``transformers`` the model is in evaluation mode: call ``train()``.
    Where the mesh has a tensor-parallel dimension the model is spread over it, as by ``unwall.parallelize``.

    Where the mesh has a pipeline dimension, say ``microbatches`` and what else ``unwall.pipeline`` takes (``loss``,
    ``schedule``, ``split``): as from there ``part, schedule`` come back, and each rank reads the weights of its stages alone.
    """
    from unwall.checkpoint.pretrained import build_empty, initialize_missing, refuse_missing  # imports transformers

    cuts = pipeline_options(mesh, microbatches, overrides)
    ranks, error = Ranks(process_group() if mesh is None else everyone_in(mesh)), None
    try:
        model = build_empty(path, auto_class, dtype, overrides)
        if mesh is not None and sizes_of(mesh, "tensor"):
            parallelize(model, mesh)
        keys = load_weights(model, path, strict=False)
        refuse_missing(model, path, keys.missing_keys)
    except Exception as found:
        error = found
    agree(ranks, error, f"from_pretrained({os.fspath(path)!r})")
    made = shard(model, plan, mesh) if cuts is None else pipeline(model, plan, **cuts)
    initialize_missing(model, path, keys.missing_keys, keys.unexpected_keys)
    return made


@contextmanager
def init(plan: Plan | None = None, device: torch.device | str | None = None) -> Iterator[None]:
    """Modules built inside never exist whole: once the next parameters are built, only this rank's 1/N of a parameter is kept.

    Initialisation runs as it is, so the values are those of a plain build with the same seed. Follow with ``unwall.shard``.
    ``device="cuda"``: it runs there, which takes seconds for billions of parameters instead of a minute; the values are those
    of a plain build under ``torch.device("cuda")``. None: where the model's own code and ``torch.device`` contexts say.
    With several ranks all of them build the same model, after ``torch.distributed`` was initialised. With a plan that has a
    ``disk``, what exceeds half of the host's budget waits there. Inside another ``init`` it changes nothing: that one goes on.
    """
    plan = Plan() if plan is None else plan
    check_plan(plan)
    where = None if device is None else torch.device(device)
    if where is not None and where.type not in ("cpu", "cuda"):
        raise ValueError(
            f"unwall.init(device={str(device)!r}): initialisation runs on 'cuda' or 'cpu'; for a model without values build it "
            "under torch.device('meta'), without unwall.init"
        )
    if where == torch.device("cuda") and default_device().type == "cuda":
        where = default_device()  # this rank's
    if building():
        yield
        return
    ranks = Ranks(process_group())
    host_bytes = plan.budget_host_bytes
    if host_bytes is None:
        host_bytes = available_bytes() // local_ranks()
    with Pager(ranks, Shelf(plan.directories, host_bytes // 2, ranks.rank)).active():
        with nullcontext() if where is None else where:
            yield


def engine(model: nn.Module) -> Engine:
    """The engine of a sharded model. RuntimeError for a model that is not sharded."""
    found = engine_of(model)
    if found is not None:
        return found
    if not isinstance(model, nn.Module):
        raise TypeError(f"expected a sharded model (a torch.nn.Module), got {type(model).__name__}")
    inside = {id(held): held for held in (engine_of(module) for module in model.modules()) if held is not None}
    if not inside:
        raise RuntimeError(f"{type(model).__name__} is not sharded: call unwall.shard(model) first")
    if len(inside) > 1:
        raise RuntimeError(f"{type(model).__name__} holds {len(inside)} sharded models: name one of them")
    return next(iter(inside.values()))


@contextmanager
def full_params(
    module: nn.Module | nn.Parameter | Iterable[nn.Parameter],
    write: bool = False,
    rank: int = 0,
    dtype: torch.dtype | None = None,
) -> Iterator[None]:
    """Inside, the parameters of a module, or those given, are whole, in full precision, on every rank.

    That is fp32 where training keeps a master, whatever they were given in; ``dtype`` asks for another one. ``write=True``
    scatters what was changed (the values of ``rank`` count). The model cannot run inside. All ranks enter together.
    """
    listed = module.parameters() if isinstance(module, nn.Module) else [module] if isinstance(module, nn.Parameter) else module
    params = list(dict.fromkeys(listed))
    if not params:
        yield
        return
    things: list[nn.Module | nn.Parameter] = [module, *params] if isinstance(module, nn.Module) else [*params]
    owners = list(dict.fromkeys(found for found in map(engine_of, things) if found is not None))
    if not owners:
        what = type(module).__name__ if isinstance(module, nn.Module) else "none of these parameters"
        raise RuntimeError(f"{what} is not sharded: call unwall.shard(model) first")
    with ExitStack() as stack:
        for owner in owners:
            if not 0 <= rank < owner.ranks.size:
                raise ValueError(
                    f"rank={rank}: the model is sharded over {owner.ranks.size} ranks, 0 to {owner.ranks.size - 1}"
                )
            if owner.changed and not owner.lent:
                take_in(owner)
            stack.enter_context(lend(owner, params, write, rank, dtype))
        yield


@contextmanager
def no_sync(model: nn.Module) -> Iterator[None]:
    """Backward inside keeps gradients on this rank; the first backward outside sums all of them over the ranks."""
    with engine(model).without_sync():
        yield


def move(model: nn.Module, plan: Plan) -> None:
    """Moves the states of a sharded model to the tiers that another plan names, between two steps, and changes no bit of them:
    to free the device for an evaluation or another model, and back::

        unwall.move(model, dataclasses.replace(plan, params="host", optimizer="host"))

    Only tiers, budgets and ``disk`` may differ from the plan of ``shard``. PlanError, before anything changes, where it does
    not fit; RuntimeError inside a pass, and while gradients are held. All ranks call it together.
    """
    check_plan(plan)
    move_states(engine(model), plan)


def stats(model: nn.Module) -> Stats:
    """What the model holds and moved since the last ``stats(model).reset()``."""
    return read_stats(engine(model))


@contextmanager
def profile(model: nn.Module) -> Iterator[Profile]:
    """Records the time line of compute, links, updates and stalls inside. Look at the profile after leaving the context."""
    owner = engine(model)
    found, timeline = Profile(), owner.tiers.links.timeline
    owner.finish()
    _wait_for_device(owner)
    read_stats(owner)  # what ran before is not on the time line
    timeline.spans = []
    try:
        yield found
    finally:
        owner.lane.leave()
        owner.finish()
        _wait_for_device(owner)
        read_stats(owner)
        owner.lane.collect()
        found.spans, timeline.spans = sorted(timeline.spans or [], key=lambda span: span.start), None


def _wait_for_device(owner: Engine) -> None:
    if owner.device.device.type == "cuda":
        torch.cuda.synchronize(owner.device.device)


def plan(model: "nn.Module | str", *, batch: int | None = None, seq: int = 1024, **options: Any) -> "ChosenPlan":
    """The fastest plan that fits, with its prediction: ``print`` it, or give it to ``shard``. PlanError says what would fit.

    ``batch``: samples per step, over all ranks. ``unwall.planner.public.plan`` documents the other options (``hardware``,
    ``device_bytes``, ``disk``, ``objective`` ...) and what else a model may be given as.
    """
    from unwall.planner.public import plan as choose  # training needs none of it

    return choose(model, batch=batch, seq=seq, **options)


def probe(disk: str | Path | None = None, refresh: bool = False) -> "Hardware":
    """What this machine reaches (links, memory, disk, matrix products), measured once and remembered."""
    from unwall.planner.probe import probe as measure

    return measure(disk=disk, refresh=refresh)
