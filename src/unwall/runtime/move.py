"""Moves the states of a sharded model to other tiers between two steps.

[Note: moving]
The groups stay as they are, and each gets the home that the new plan gives it. Everything that can be known is looked at before
anything changes: what the plan may not change, whether it fits, whether someone still needs what is on the device. Then one
group after the other is copied and its old places are freed, so that a move takes memory for one group beyond both plans.
Where a tier refuses what should have fitted (a drive or a card that others have filled meanwhile), what was moved goes back.
"""

import gc
import time
from dataclasses import fields, replace

import torch
from torch.autograd.graph import increment_version

from unwall.plans import Plan, PlanError
from unwall.runtime.assemble import keep_within_card
from unwall.runtime.engine import Engine
from unwall.runtime.resources import HOST_SHARE, STATE_SHARE, disk_buffers, room_on
from unwall.runtime.sizes_now import sizes_now
from unwall.runtime.turns import alone
from unwall.shards.build import Room, check_fit, smallest
from unwall.shards.gradient import Gradient
from unwall.shards.group import Group, Residence
from unwall.shards.home import Home, Sizes
from unwall.shards.owned import tier_of
from unwall.shards.placement import place
from unwall.shards.states import GROUP, StateKey
from unwall.shards.store import Store
from unwall.tiers.disk import DiskTier
from unwall.tiers.sizes import ALIGNMENT

MOVABLE = ("params", "grads", "optimizer", "disk", "device_bytes", "host_bytes", "disk_bytes")
"""The fields of a plan that another one may have otherwise."""
PATIENCE_SECONDS = 0.5
"""How long a rank alone waits for threads of its own that let go of memory."""
OF_COLLECTIVES_SECONDS = 10.0
"""The same over several ranks: a collective's thread may let go of it a while after its work has ended, where others keep the
processors busy."""


@alone
def move_states(engine: Engine, plan: Plan) -> None:
    """What ``unwall.move`` does. See [Note: moving]."""
    if isinstance(plan, Plan):  # as shard has found out
        kept, most = engine.plan.node_ranks, engine.ranks.size
        if plan.node_ranks is None or (kept == most and plan.node_ranks > most):
            plan = replace(plan, node_ranks=kept)
    engine.forward.forget_interrupted()
    engine.backward.forget_interrupted()
    with engine.executor.prepared("move"):
        _check_moment(engine)
        _check_fields(engine.plan, plan)
        engine.finish()
        _check_gradients(engine)
        _check_held(engine)
        sizes = [sizes_now(engine, group, plan) for group in engine.groups]
        room = _room(engine, plan)
    room = smallest(engine.ranks.every(room))
    homes = place(sizes, plan, room.device_bytes, room.host_bytes)
    with engine.executor.prepared("move"):
        check_fit(sizes, homes, plan, engine.ranks.size, room)
        _check_disk(engine, plan, homes)
    _check_alike(engine, homes)
    _change(engine, plan, sizes, homes)


def _change(engine: Engine, plan: Plan, sizes: list[Sizes], homes: list[Home]) -> None:
    before, old_plan = [group.home for group in engine.groups], engine.plan
    budgets = {name: ledger.budget_bytes for name, ledger in engine.tiers.ledgers.items()}
    error: BaseException | None = None
    try:
        engine.audience.about_to_move()
        _lift_budgets(engine)
        if any(home.on_disk for home in homes):
            _open_disk(engine, plan, sizes, homes)
        _move_all(engine, homes)
    except BaseException as found:
        error = found
    failed = next((rank for rank, said in enumerate(engine.ranks.every(error is not None)) if said), None)
    if failed is not None:
        _move_all(engine, before)
    now, kept = (before, old_plan) if failed is not None else (homes, plan)
    if engine.tiers.disk is not None and kept.activations != "disk" and not any(home.on_disk for home in now):
        engine.tiers.close_disk()
    engine.plan = kept
    new = {"device": plan.budget_device_bytes, "host": plan.budget_host_bytes, "disk": plan.budget_disk_bytes}
    for name, ledger in engine.tiers.ledgers.items():
        ledger.budget_bytes = budgets.get(name) if failed is not None else new[name]
    _follow(engine, sizes, now)
    if error is not None:
        error.add_note("unwall.move: the states are where they were")
        raise error
    if failed is not None:
        raise RuntimeError(f"unwall.move failed on rank {failed}: the states are where they were, on every rank")


def _follow(engine: Engine, sizes: list[Sizes], homes: list[Home]) -> None:
    """What depends on the homes of groups is found out anew."""
    engine.executor.grown()
    engine.forward.saved.follow_anew()
    keep_within_card(engine, sizes, homes)
    engine.staying.clear()
    engine.staying.update(group.buffer.key for group in engine.groups if not group.evictable)


# -- what is looked at before --------------------------------------------------------------------------------------------


def _check_moment(engine: Engine) -> None:
    if engine.forward.running or engine.backward.running:
        raise RuntimeError("unwall.move inside a forward or backward of the model: move its states between two steps")
    if engine.lent:
        raise RuntimeError("unwall.move inside unwall.full_params: leave the context first")


def _check_fields(old: Plan, new: Plan) -> None:
    if not isinstance(new, Plan):
        raise TypeError(f"unwall.move takes an unwall.Plan, got {type(new).__name__}")
    if old.transient != new.transient:
        raise PlanError(
            f"unwall.move from grads={old.grads!r} to grads={new.grads!r}: whether gradients are kept is decided when the "
            "model is sharded. Save it, and shard it anew"
        )
    for field in fields(Plan):
        was, wanted = getattr(old, field.name), getattr(new, field.name)
        if field.name not in MOVABLE and was != wanted:
            raise PlanError(
                f"unwall.move changes tiers and budgets only, but {field.name} is {wanted!r} and was {was!r}: write "
                "dataclasses.replace(plan, ...) with the plan of unwall.shard, or build the model again"
            )


def _check_gradients(engine: Engine) -> None:
    for gradient in engine.gradients:
        if gradient.held or gradient.pending or gradient.present or gradient.elsewhere:
            raise RuntimeError(
                f"unwall.move while gradients are held (group {gradient.group.name}): a step may need them where they are. "
                "Call optimizer.step() or zero_grad() first"
            )


def _check_held(engine: Engine) -> None:
    """Nobody needs what is on the device: it would stay there, or a backward would look for it in vain."""
    try:
        for group in engine.groups:
            if group.residence is not Residence.ABSENT:
                group.drop()
            if _is_held(group, PATIENCE_SECONDS if engine.ranks.size == 1 else OF_COLLECTIVES_SECONDS):
                raise RuntimeError(
                    f"unwall.move, but the parameters of group {group.name} are still in use: by a forward whose backward has "
                    "not run, or by a tensor that shares their memory. Run backward and step, or let go of the loss "
                    "(del loss) and copy what you keep (.detach().clone())"
                )
    except BaseException:
        for group in engine.groups:
            _show(group)
        raise


def _is_held(group: Group, patience_s: float) -> bool:
    until = time.monotonic() + patience_s
    if group.buffer.is_held:
        gc.collect()  # an error that was caught may have left a circle, with the loss in it
    while group.buffer.is_held:
        if time.monotonic() > until:
            return True
        time.sleep(0.001)
    return False


def _check_disk(engine: Engine, plan: Plan, homes: list[Home]) -> None:
    """What the disk takes, and where it is."""
    now = engine.tiers.disk
    stays = any(home.on_disk and group.home.on_disk for home, group in zip(homes, engine.groups, strict=True))
    if now is not None and stays and {path.parent.resolve() for path in now.paths} != {d.resolve() for d in plan.directories}:
        raise PlanError(
            f"unwall.move to disk={plan.disk!r} while states are on disk in {now.paths[0].parent}: move them to the host first"
        )
    for group, home in zip(engine.groups, homes, strict=True):
        if home.on_disk and group.layout.dtype is torch.float64:
            raise PlanError(f"group {group.name} is float64, which is not updated on disk: place it on host or device")
        for key, store in group.states.items():
            if tier_of(key, home) == "disk" and key.owner != GROUP and store.dtype.itemsize * (ALIGNMENT // 2) % ALIGNMENT:
                raise PlanError(
                    f"{key.name!r} of group {group.name} is {store.dtype}, too narrow for the disk: place it on host or device"
                )


def _check_alike(engine: Engine, homes: list[Home]) -> None:
    every = engine.ranks.every(homes)
    for rank, theirs in enumerate(every):
        if theirs != every[0]:
            raise ValueError(f"unwall.move was given another plan on rank {rank} than on rank 0: give the same on every rank")


def _room(engine: Engine, plan: Plan) -> Room:
    """What this rank may use, what it uses now included."""
    found, ledgers = room_on(engine.device.device, plan), engine.tiers.ledgers
    device, host = found.device_bytes, found.host_bytes
    if device is not None and plan.budget_device_bytes is None:
        device += int(STATE_SHARE * ledgers["device"].live_bytes)
    if host is not None and plan.budget_host_bytes is None:
        host += int(HOST_SHARE * ledgers["host"].live_bytes)
    return Room(device, host, found.disk_bytes)


# -- the move ------------------------------------------------------------------------------------------------------------


def _lift_budgets(engine: Engine) -> None:
    """While states are on their way neither plan's budgets hold."""
    for ledger in engine.tiers.ledgers.values():
        ledger.budget_bytes = None


def _open_disk(engine: Engine, plan: Plan, sizes: list[Sizes], homes: list[Home]) -> None:
    """A disk, if there is none yet, and buffers of the right size on the host."""
    tiers = engine.tiers
    disk = tiers.disk
    if disk is None or {path.parent.resolve() for path in disk.paths} != {d.resolve() for d in plan.directories}:
        disk = DiskTier(plan.directories, rank=engine.ranks.rank)
    before, old = tiers.disk, tiers.chunks
    tiers.open_disk(disk, *disk_buffers(sizes, homes))
    old.close()
    if before is not None and before is not disk:
        before.close()


def _move_all(engine: Engine, homes: list[Home]) -> None:
    for group, gradient, home in zip(engine.groups, engine.gradients, homes, strict=True):
        try:
            if home != group.home:
                _move_group(engine, group, gradient, home)
        finally:
            _show(group)


@torch.no_grad()
def _move_group(engine: Engine, group: Group, gradient: Gradient, home: Home) -> None:
    """If this raises, the group is where it was."""
    group.await_readers()
    moved: dict[StateKey, Store] = {}
    old_param, old_buffer = group.param, group.buffer
    try:
        for key, store in group.states.items():
            if store.tier != (tier := tier_of(key, home)):
                made = moved[key] = Store(engine.tiers, group.pending, tier, store.numel, store.dtype, store.label)
                made.tensor().copy_(store.tensor(write=False))
                group.pending.staging.close()
        group.live_at(home, group.own_param_for(write=False))
    except BaseException:
        for made in moved.values():
            made.free()
        raise
    for key, made in moved.items():
        group.states[key].free()
        group.states[key] = made
    if old_param is not None:
        old_param.free()
    old_buffer.free()
    gradient.move()
    increment_version(group.params)  # backward through a graph from before raises


def _show(group: Group) -> None:
    """The parameters of a flat buffer that is never dropped, and whole on this rank, are views of it at all times."""
    if group.updated_in_place and group.residence is Residence.ABSENT:
        group.attach()
        group.close()
