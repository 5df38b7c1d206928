"""The update of one group by any rule: what it reads and writes, and the work, wherever the states live."""

from collections.abc import Sequence

import torch

from unwall.optim.disk_update import DiskUpdate, StateParts
from unwall.optim.own_states import OwnStates
from unwall.optim.rule import Span, UpdateRule, finish_updates, spans_of
from unwall.optim.runs import Run
from unwall.optim.updates import Factor, Rest, Work
from unwall.runtime.engine import Engine
from unwall.shards.group import Group
from unwall.shards.master import make_master, set_lean
from unwall.shards.states import GRAD, GROUP, LEAN_MOMENTS, PARAM, StateKey, adamw_specs, master_specs
from unwall.shards.store import Store
from unwall.tiers.sizes import ALIGNMENT


def make_states(group: Group, rule: UpdateRule, own: OwnStates) -> dict[StateKey, Store]:
    """The rule's states, which come into being at first use, as the master of parameters that were frozen does."""
    if group.layout.dtype is torch.float64 and group.home.on_disk:
        raise ValueError(f"group {group.name} is float64, which is not updated on disk: place it on host or device")
    specs = rule.specs(group)
    for spec in specs if group.home.states == "disk" else ():
        if spec.nbytes(ALIGNMENT // 2) % ALIGNMENT:  # chunks are multiples of that many elements
            raise ValueError(
                f"group {group.name} has its states on disk, but {spec.name!r} in {spec.dtype} is too narrow to be read in "
                "whole sectors: keep it in 2 bytes or more, or place the group on host or device"
            )
    _agree_on_lean(group, LEAN_MOMENTS in specs, own)
    make_master(group)
    return own.stores(group, specs)


def _agree_on_lean(group: Group, lean: bool, own: OwnStates) -> None:
    """A group's master has as many bits as its optimizer's states need."""
    if group.lean == lean or group.layout.dtype is not torch.bfloat16:
        return
    others = {key.name for key in group.states if key.owner not in (GROUP, own.owner)}
    if LEAN_MOMENTS.name in others or (lean and others & {spec.name for spec in adamw_specs(torch.float32)}):
        raise ValueError(
            f"another optimizer keeps {'exact' if lean else 'lean'} states of group {group.name}: give both the same states, "
            "or delete the other one first"
        )
    set_lean(group, lean)


def stores_of(group: Group, rule: UpdateRule, own: OwnStates) -> dict[StateKey, Store]:
    """What an update writes, where it lives. Without ``PARAM`` where the flat buffer is the parameters' home."""
    found = make_states(group, rule, own)
    if group.param is not None:
        found[PARAM] = group.param
    return {**found, **{spec.key(): group.store(spec) for spec in master_specs(group.layout.dtype, group.lean)}}


def settle(group: Group) -> None:
    """Before an update: another optimizer's has ended, and what was looked at, or loaded, is on disk again."""
    group.pending.settle()
    group.pending.staging.close()


def spans_in_memory(engine: Engine, group: Group, stores: dict[StateKey, Store], runs: Sequence[Run]) -> list[Span]:
    """What an update reads and writes, of a group with nothing on disk."""
    tensors = {key: store.tensor(write=False) for key, store in stores.items()}  # they are written when the update runs
    tensors[PARAM] = group.own_param_for(write=False)
    return spans_of(tensors, engine.gradients[group.index].value, runs)


def spans_on_device(engine: Engine, group: Group, stores: dict[StateKey, Store], runs: Sequence[Run]) -> list[Span]:
    """The same of a group on the device, after ``settle``, with few operations: nothing of it is anywhere else."""
    own, value = group.own_param_for(write=False), engine.gradients[group.index].value
    found = []
    for run in runs:
        parts = {key: store.part(run.start, run.end) for key, store in stores.items() if key is not PARAM}
        parts[PARAM], parts[GRAD] = own[run.start : run.end], value[run.start : run.end]
        found.append(Span.of(parts, run.key))
    return found


def host_work(
    rule: UpdateRule, engine: Engine, group: Group, stores: dict[StateKey, Store], runs: Sequence[Run], factor: Factor
) -> Work:
    """The update of a group on the host, in place, for the thread that updates."""
    update = _host_work(rule, engine, group, stores, runs, factor)

    def work() -> Rest | None:
        for store in stores.values():
            store.await_reader()
        return update()

    return work


def _host_work(
    rule: UpdateRule, engine: Engine, group: Group, stores: dict[StateKey, Store], runs: Sequence[Run], factor: Factor
) -> Work:
    gradient = engine.gradients[group.index]
    if group.home.on_disk:
        return DiskUpdate(
            group.name, rule, StateParts(stores, gradient.source), runs, engine.tiers, gradient.landing, factor
        ).begin
    spans, landing = spans_in_memory(engine, group, stores, runs), gradient.landing
    meter, label = engine.tiers.updates, group.name

    def work() -> None:
        if landing is not None:
            landing.wait()
        finish_updates(meter, label, spans, rule.on_host(spans, factor.get()))

    return work
