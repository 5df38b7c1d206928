"""Modules and parameters that come into a model after ``shard``: adapters, resized embeddings, replaced modules.

[Note: newcomers]
torch tells of every module and parameter that is registered anywhere. Where a sharded model gets one, it is only noted that the
model changed: constructors are under way, and values may still be written. The next outermost forward, or an optimizer that is
given a parameter nobody knows, looks at the model once. New parameters get groups of their own behind the others, new modules
get hooks. All ranks do that at the same point, and start from rank 0's values. So whoever changes nothing pays nothing.

What left the model keeps its group, unused, until the model goes.
"""

import dataclasses
import weakref

from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook, register_module_parameter_registration_hook
from torch.utils.weak import WeakIdKeyDictionary

from unwall.runtime.engine import Engine
from unwall.runtime.hooks import engine_of, follow_wrapper, load_through, state_dicts_of, tie
from unwall.runtime.init import whole_value
from unwall.runtime.refusals import refuse_around
from unwall.shards.build import ignored, make_groups, plan_groups, sizes_of
from unwall.shards.home import DEVICE, Home, Sizes
from unwall.shards.local import is_distributed

_COMPILED = "OptimizedModule"
"""What torch.compile puts around a model: it calls the model as it is."""
_engines: "weakref.WeakSet[Engine]" = weakref.WeakSet()
_wrappers = WeakIdKeyDictionary()  # module that holds a sharded model -> weak reference to the engine
_watching = False


def watch(engine: Engine) -> None:
    """Notices from now on what is put into the model. See [Note: newcomers]."""
    global _watching
    _engines.add(engine)
    engine.look_again = take_in
    if not _watching:
        _watching = True
        register_module_module_registration_hook(_module_registered)
        register_module_parameter_registration_hook(_param_registered)


def _param_registered(module: nn.Module, name: str, param: nn.Parameter | None) -> None:  # noqa: ARG001 (torch's signature)
    engine = engine_of(module)
    if engine is not None and param is not None and id(param) not in engine.places:
        engine.changed = True


def _module_registered(module: nn.Module, name: str, submodule: nn.Module | None) -> None:  # noqa: ARG001 (torch's signature)
    if submodule is None:
        return
    refuse_around(module, submodule, lambda part: engine_of(part) is not None)
    inside = engine_of(submodule)
    engine = engine_of(module)
    if engine is not None:
        engine.changed = engine.changed or inside is not engine
        return
    held = _held_whole(submodule)
    if held is not None and not isinstance(module, nn.ModuleList | nn.ModuleDict) and type(module).__name__ != _COMPILED:
        _wrappers[module] = weakref.ref(held)
        follow_wrapper(held, module)
        load_through(module, state_dicts_of(_root(held)))


def _held_whole(module: nn.Module) -> Engine | None:
    """The engine of the sharded model that a module is, or holds."""
    found = _wrappers.get(module)
    engine = engine_of(module) if found is None else found()
    if not isinstance(engine, Engine) or (found is None and _root(engine) is not module):
        return None
    return engine


def _root(engine: Engine) -> nn.Module:
    model = engine.root() if engine.root is not None else None
    assert model is not None
    return model


def take_in_with(param: nn.Parameter) -> None:
    """Someone has a parameter that may be new: the model that holds it, if there is one, takes in what is new, told of or not
    (``model._modules`` may be written to)."""
    unknown = engine_of(param) is None
    for engine in list(_engines):
        model = engine.root() if (engine.changed or unknown) and engine.root is not None else None
        if model is not None and any(own is param for own in model.parameters()):
            take_in(engine)
            return


def take_in(engine: Engine) -> None:
    """Groups for new parameters, hooks for new modules. All ranks call it together."""
    model = _root(engine)
    new = {
        name: param
        for name, param in model.named_parameters()
        if id(param) not in engine.places and id(param) not in engine.ignored
    }
    _agree(engine, new)
    chosen = {name: param for name, param in new.items() if not ignored(engine.plan, name, param)}
    for name, param in chosen.items():
        _check(engine, name, param)
    if chosen:
        _make_groups(engine, model, chosen)
    tie(engine, model, state_dicts_of(model))
    engine.changed = False


def _agree(engine: Engine, new: dict[str, nn.Parameter]) -> None:
    if engine.ranks.size == 1:
        return
    engine.executor.together("a model that changed after shard")
    outline = [(name, tuple(param.shape), param.dtype, param.requires_grad) for name, param in new.items()]
    every = engine.ranks.every(outline)
    for rank, other in enumerate(every):
        if other != every[0]:
            apart = next(iter({str(entry[0]) for entry in set(other) ^ set(every[0])}), "the order of the new parameters")
            raise RuntimeError(
                f"the ranks put different parameters into the model after unwall.shard: rank {rank} differs from rank 0 in "
                f"{apart}. Change the model alike on every rank"
            )


def _check(engine: Engine, name: str, param: nn.Parameter) -> None:
    what = f"parameter {name} came into the model after unwall.shard and "
    if engine_of(param) not in (None, engine):
        raise RuntimeError(what + "belongs to another sharded model: put a copy into this one")
    if is_distributed(param):
        raise RuntimeError(what + "is a DTensor: fully_shard and tensor parallelism cannot be used on top of unwall.shard")
    if param.is_complex():
        raise ValueError(what + "is complex, which no optimizer here updates: hold it as view_as_real")
    value = param.data
    if not param.is_meta and value.is_floating_point() and value.numel() and bool(value.float().isnan().any()):
        raise RuntimeError(
            what + "holds NaN: it was computed from parameters that are not in memory as a whole. Change the model inside "
            "unwall.full_params(model), or before unwall.shard"
        )


def _make_groups(engine: Engine, model: nn.Module, new: dict[str, nn.Parameter]) -> None:
    ids = {id(param) for param in new.values()}
    plan, ranks = engine.plan, engine.ranks
    most = 62 * ranks.control.bit_words if ranks.size > 1 else None
    planned = plan_groups(model, plan, ranks.size, wanted=lambda entry: id(entry.param) in ids, most_params=most)
    homes = [_home(engine, size) for size in sizes_of(planned, plan, ranks.size, engine.others.replica_count)]
    unwritten: dict[object, str] = {id(param): name for name, param in new.items() if param.is_meta}
    groups, gradients = make_groups(
        planned, homes, plan, engine.tiers, ranks, lambda entry: whole_value(entry.param), after=engine.groups
    )
    engine.add(groups, gradients)
    engine.unwritten |= unwritten


def _home(engine: Engine, size: Sizes) -> Home:
    """Where the rest of the model lives, but not on disk: its buffers were made for what was there at ``shard``."""
    if size.trainable and engine.plan.optimizer == "device":
        return DEVICE
    away = next((group.home for group in engine.groups if group.home.tier == "host"), None)
    if away is None:
        return DEVICE
    return dataclasses.replace(away, params="host", states="host", grads="host", apart=None)
