"""Ties a model's modules to the engine: hooks, watched parameter mappings, casts at the edges."""

import functools
import sys
import weakref
from collections.abc import Callable, Iterator
from threading import get_ident
from typing import Any, NoReturn, TypeVar

import torch
from torch import nn

from unwall.native import interrupts
from unwall.runtime.absent import describe_only
from unwall.runtime.casts import Casts, casts_of
from unwall.runtime.covered import groups_to_cover
from unwall.runtime.engine import Engine
from unwall.runtime.kept_whole import place_buffers, place_ignored
from unwall.runtime.outside import watch_outside
from unwall.runtime.owners import Owners
from unwall.runtime.pretrained import write_given_dtype
from unwall.runtime.refusals import refuse_upon
from unwall.runtime.state_dicts import StateDictHooks
from unwall.runtime.whole import dtypes_of
from unwall.shards.local import is_distributed

owners: Owners[Engine] = Owners()
"""Whose each module and each parameter is. The hooks on the modules own the engine: it goes with the model."""


def engine_of(thing: nn.Module | nn.Parameter) -> Engine | None:
    """The engine of a sharded model, of one of its modules, or of one of its parameters."""
    return owners.of(thing)


def refuse_copy() -> NoReturn:
    raise RuntimeError(
        "a sharded model cannot be deep-copied: its parameters are only shards. "
        "Copy the model before unwall.shard, or build a new one and load model.state_dict() into it."
    )


def refuse_pickle() -> NoReturn:
    raise RuntimeError("a sharded model cannot be pickled: its parameters are only shards. Save model.state_dict() instead.")


class Hook:
    """A callable that ties one module to its engine. Copying a sharded model would share its state: it is refused."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        refuse_copy()

    def __reduce__(self) -> NoReturn:
        refuse_pickle()


class Enter(Hook):
    """Before a module's forward."""

    def __init__(self, engine: Engine, groups: tuple[int, ...], reads: tuple[nn.Parameter, ...], casts: "Casts | None") -> None:
        super().__init__(engine)
        self._forward, self._covered, self._saved = engine.forward, engine.forward.covered, engine.forward.saved
        self._places = engine.places
        self.cover: tuple[int, ...] = ()
        """The groups of all that is below it, where it covers that. See [Note: covered calls] in runtime/covered.py."""
        self.aim(groups, reads, casts)

    def aim(self, groups: tuple[int, ...], reads: tuple[nn.Parameter, ...], casts: "Casts | None") -> None:
        """What the module reads. Again where it was given other parameters."""
        self._groups = groups
        self._reads = reads
        self._casts = casts

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any] | None:
        forward = self._forward
        if forward.quiet and forward.thread == get_ident() and module is not forward.outermost:
            for param in self._reads:
                forward.touched(param, self._places[id(param)])
        elif (
            (covering := self._covered.frame) is not None
            and module is not covering.module
            and module is not forward.outermost  # it is called anew: the call that covered others was interrupted
            and forward.thread == get_ident()
            and self._covered.groups.issuperset(self._groups)
        ):
            if self._saved.watching:
                self._saved.cover()
            for param in self._reads:
                forward.touched(param, self._places[id(param)])
        else:
            with interrupts.deferred:
                forward.enter(module, self._groups, self._reads, self.cover)
        return None if self._casts is None else self._casts.inputs(args, kwargs)


class Leave(Hook):
    """After a module's forward, also when it raised."""

    def __init__(self, engine: Engine, casts: "Casts | None") -> None:
        super().__init__(engine)
        self._forward = engine.forward
        self.casts = casts

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        if self.casts is not None:
            output = self.casts.outputs(output)
        forward = self._forward
        if forward.quiet and forward.thread == get_ident() and module is not forward.outermost:
            return output
        # Inside a call that covers it a module has no frame, unless it reads more.
        if forward.covered.frame is None or forward.thread != get_ident() or forward.frames[-1].module is module:
            with interrupts.deferred:
                forward.leave(module, args, kwargs, output)
        return output


AnyHook = TypeVar("AnyHook", bound=Hook)


@functools.cache
def _opaque(kind: type[AnyHook]) -> type[AnyHook]:
    """The same hook for a compiled module: dynamo runs it, and all that it calls, as it is instead of tracing into it."""
    import torch._dynamo  # heavy, and there already where something is compiled

    call: Any = kind.__call__
    return type(kind.__name__, (kind,), {"__call__": torch._dynamo.disable(call)})


class Saving(Hook):
    """A ``state_dict`` is a turn as a whole, so that a step of another thread does not come between two modules."""

    def begin(self, *_: Any) -> None:
        self.engine.turn.begin("state_dict", sys._getframe(1))

    def end(self, *_: Any) -> None:
        self.engine.turn.end()


_entry = dict.__getitem__


class Watched(dict[str, Any]):
    """A module's ``_parameters``: tells the engine when a running call looks a parameter up, so that one read outside its
    owner's forward (a tied head, a functional use) is fetched like any other."""

    def __init__(self, engine: Engine, entries: dict[str, Any]) -> None:
        super().__init__(entries)
        self._forward = engine.forward
        self._places = engine.places

    def __getitem__(self, name: str) -> Any:
        param = _entry(self, name)
        if param is not None and (places := self._places.get(id(param))) is not None:
            forward = self._forward
            if forward.frames or forward.running:
                forward.touched(param, places)
        return param

    def __setitem__(self, name: str, param: Any) -> None:
        if isinstance(param, torch.Tensor) and id(param) not in self._places and is_distributed(param):
            raise RuntimeError(
                f"parameter {name} of a sharded model would become a DTensor: fully_shard and tensor parallelism cannot be "
                "applied on top of unwall.shard, which partitions the model already"
            )
        super().__setitem__(name, param)

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        refuse_copy()

    def __reduce__(self) -> NoReturn:
        refuse_pickle()

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        refuse_pickle()


def install(engine: Engine, model: nn.Module) -> None:
    """Ties a model to its engine: calls, parameters, gradients, saving and loading, conversions, buffers."""
    engine.root = weakref.ref(model)
    # torch's own would set .grad only, and gradients that are on their way would still come.
    model.__dict__["zero_grad"] = engine.zero_grad
    tie(engine, model, StateDictHooks(engine))


def tie(engine: Engine, model: nn.Module, state_dicts: StateDictHooks) -> None:
    """Ties modules and parameters to the engine. Again where some were put into the model: those that are tied stay so."""
    new = [module for module in model.modules() if not _is_tied(engine, module)]
    _remember(engine, model)
    for param in _params(engine):
        engine.backward.take_gradients_of(param)
    names = {module: name for name, module in model.named_modules()}
    for module, unit in _units(model):
        _follow_calls(engine, module, unit, casts_of(engine, module, _own(module, unit), names[module]))
        if not unit:
            _watch_lookups(engine, module)
    _cover_calls(engine, model)
    for module in new:
        _save_and_load_whole(module, state_dicts)
        module.__dict__["_apply"] = functools.partial(_convert, engine, module)
        refuse_upon(module)
    place_buffers(engine, new)
    place_ignored(engine, model)
    write_given_dtype(engine, new)
    watch_outside(engine)


def _is_tied(engine: Engine, module: nn.Module) -> bool:
    convert = module.__dict__.get("_apply")
    return isinstance(convert, functools.partial) and convert.args[0] is engine


def state_dicts_of(model: nn.Module) -> StateDictHooks:
    """What saves and loads a sharded model."""
    owners = (getattr(hook, "__self__", None) for hook in model._load_state_dict_post_hooks.values())
    return next(owner for owner in owners if isinstance(owner, StateDictHooks))


def follow_wrapper(engine: Engine, module: nn.Module) -> None:
    """A module holds the model and may call parts of it as it likes (adapters do): its call is the outermost one then."""
    if not any(isinstance(hook, Enter) and hook.engine is engine for hook in module._forward_pre_hooks.values()):
        module.register_forward_pre_hook(Enter(engine, (), (), None), prepend=True, with_kwargs=True)
        module.register_forward_hook(Leave(engine, None), with_kwargs=True, always_call=True)
        module.__dict__["zero_grad"] = functools.partial(_zero_all, engine, module.zero_grad)


def _zero_all(engine: Engine, others: Callable[[bool], None], set_to_none: bool = True) -> None:
    engine.zero_grad(set_to_none)
    others(set_to_none)


def _remember(engine: Engine, model: nn.Module) -> None:
    """Whose the modules and parameters are, for ``engine_of``."""
    for param in _params(engine):
        owners.add(param, engine)
    for module, _ in _units(model):
        owners.add(module, engine)


def _follow_calls(engine: Engine, module: nn.Module, unit: bool, casts: Casts | None) -> None:
    """Hooks before and after a module's forward."""
    own = tuple(param for param in _own(module, unit) if id(param) in engine.places)
    own = tuple(param for param in own if len(engine.places[id(param)]) == 1)  # not those in tiles: see runtime/tiling.py
    groups = tuple(dict.fromkeys(place.group for param in own for place in engine.places[id(param)]))
    # What tensor parallelism has spread may be taken out of the mapping at once, past all that watches it.
    unseen = own if unit or isinstance(module, nn.RNNBase) or any(map(is_distributed, own)) else ()
    tied = [hook for hook in module._forward_pre_hooks.values() if isinstance(hook, Enter) and hook.engine is engine]
    for enter in tied:
        enter.aim(groups, unseen, casts)
    for leave in module._forward_hooks.values():
        if isinstance(leave, Leave) and leave.engine is engine:
            leave.casts = casts
    if not tied:
        before, after = (_opaque(Enter), _opaque(Leave)) if unit else (Enter, Leave)
        module.register_forward_pre_hook(before(engine, groups, unseen, casts), prepend=True, with_kwargs=True)
        module.register_forward_hook(after(engine, casts), with_kwargs=True, always_call=True)


def _cover_calls(engine: Engine, model: nn.Module) -> None:
    """Says which modules cover those below them. See [Note: covered calls] in runtime/covered.py."""
    units = list(_units(model))
    found = groups_to_cover(units, engine.places)
    for module, _ in units:
        for hook in module._forward_pre_hooks.values():
            if isinstance(hook, Enter) and hook.engine is engine:
                hook.cover = found.get(id(module), ())


def _watch_lookups(engine: Engine, module: nn.Module) -> None:
    """A parameter that is read by another module's forward counts as a use by the running call."""
    if _own(module) and not isinstance(module._parameters, Watched):
        module.__dict__["_parameters"] = Watched(engine, module._parameters)


def _save_and_load_whole(module: nn.Module, hooks: StateDictHooks) -> None:
    """``state_dict`` and ``load_state_dict`` work with whole tensors."""
    turns = Saving(hooks.engine)
    module.register_state_dict_pre_hook(turns.begin)
    module.register_state_dict_post_hook(functools.partial(interrupts.defers(hooks.saved)))  # torch sets an attribute on it
    module.register_state_dict_post_hook(functools.partial(turns.end))
    module.register_load_state_dict_pre_hook(hooks.before_load)
    module.register_load_state_dict_post_hook(hooks.after_load)
    module.__dict__["_save_to_state_dict"] = functools.partial(describe_only, module)
    load_through(module, hooks)


def load_through(module: nn.Module, hooks: StateDictHooks) -> None:
    """``load_state_dict`` of this module looks at everything first. See [Note: loading] in runtime/state_dicts.py."""
    module.__dict__["load_state_dict"] = functools.partial(hooks.load, functools.partial(type(module).load_state_dict, module))


def _convert(
    engine: Engine, module: nn.Module, change: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True
) -> nn.Module:
    """What ``model.to(...)``, ``.half()`` and the like do on a sharded model: nothing for the parameters when nothing would
    change (``model.to(device)`` after ``shard``), an error otherwise; buffers follow."""
    for param in module.parameters(recurse=recurse):
        if id(param) not in engine.places:
            param.data = change(param.data)
            continue
        if all(_changes(change, dtype, engine.device.device) for dtype in dtypes_of(engine, param)):
            raise RuntimeError(
                "a sharded model's parameters cannot be converted or moved: convert the model before unwall.shard, or choose "
                "Plan(compute_dtype=...)"
            )
    for owner in module.modules() if recurse else (module,):
        for name, buffer in owner._buffers.items():
            if buffer is not None:
                owner._buffers[name] = change(buffer)
    return module


def _changes(change: Callable[[torch.Tensor], torch.Tensor], dtype: torch.dtype, device: torch.device) -> bool:
    probe = torch.empty((1, 2, 2, 2), dtype=dtype, device=device)
    changed = change(probe)
    return (changed.dtype, changed.device, changed.stride()) != (probe.dtype, probe.device, probe.stride())


def _params(engine: Engine) -> Iterator[nn.Parameter]:
    for group in engine.groups:
        yield from group.params


def _own(module: nn.Module, unit: bool = False) -> tuple[nn.Parameter, ...]:
    """A module's own parameters, or all below it where it counts as a whole."""
    return tuple(module.parameters(recurse=unit))


def _units(module: nn.Module, seen: set[int] | None = None) -> Iterator[tuple[nn.Module, bool]]:
    """Every module once, and whether it counts as a whole: a compiled module is entered and left as one, because hooks
    inside it would cut its graph into pieces."""
    seen = set() if seen is None else seen
    if id(module) in seen:
        return
    seen.add(id(module))
    compiled = type(module).__name__ == "OptimizedModule" or module._compiled_call_impl is not None
    yield module, compiled
    if not compiled:
        for child in module.children():
            yield from _units(child, seen)
