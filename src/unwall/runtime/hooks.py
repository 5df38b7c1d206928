"""Ties a model's modules to the engine: hooks, watched parameter mappings, casts at the edges."""

import functools
import sys
import weakref
from collections.abc import Callable, Iterator
from threading import get_ident
from typing import Any, NoReturn, cast

import torch
from torch import nn

from unwall.native import interrupts
from unwall.runtime.absent import describe_only
from unwall.runtime.call_edges import Enter, Hook, Leave, Short, is_plain_call, opaque, refuse_copy, refuse_pickle
from unwall.runtime.casts import Casts, casts_of
from unwall.runtime.copied import copy_plainly
from unwall.runtime.covered import groups_to_cover
from unwall.runtime.engine import Engine
from unwall.runtime.inserts import tell_of_inserts
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


class Saving(Hook):
    """A ``state_dict`` is a turn as a whole, so that a step of another thread does not come between two modules."""

    def begin(self, *_: Any) -> None:
        turn = self.engine.turn
        turn.begin("state_dict", sys._getframe(1))
        if not turn.is_nested:
            try:
                for check in self.engine.checks:
                    check()
            except BaseException:
                turn.end()
                raise

    def end(self, *_: Any) -> None:
        self.engine.turn.end()


_entry = dict.__getitem__
_is_grad_enabled = torch.is_grad_enabled
_SWAPS = "torch.nn.utils._named_member_accessor"
"""Where ``torch.func.functional_call`` puts other values into a module, for one call."""


class Watched(dict[str, Any]):
    """A module's ``_parameters``: tells the engine when a running call looks a parameter up, so that one read outside its
    owner's forward (a tied head, a functional use) is fetched like any other."""

    def __init__(self, engine: Engine, entries: dict[str, Any]) -> None:
        super().__init__(entries)
        self._engine = weakref.ref(engine)
        self._forward = engine.forward
        self._places = engine.places
        self._hooked, self._awaiting = engine.backward.hooked, engine.backward.awaiting
        self._swapped: dict[str, torch.dtype] = {}
        """What ``functional_call`` has put here for one call, and what it is computed in."""

    def __getitem__(self, name: str) -> Any:
        param = _entry(self, name)
        if param is not None:
            forward = self._forward
            if (forward.frames or forward.running) and (places := self._places.get(id(param))) is not None:
                if forward.quiet and forward.thread == get_ident() and id(param) in self._hooked:
                    forward.lookups += 1  # what ``touched`` does in a quiet pass, without its call for each parameter
                    if param.requires_grad and _is_grad_enabled():
                        for index, slot in places:
                            self._awaiting[index].add(slot)
                else:
                    forward.touched(param, places)
            elif self._swapped and name in self._swapped and sys._getframe(1).f_globals.get("__name__") != _SWAPS:
                return param.to(self._swapped[name])
        return param

    def __setitem__(self, name: str, param: Any) -> None:
        if isinstance(param, torch.Tensor) and id(param) not in self._places and is_distributed(param):
            raise RuntimeError(
                f"parameter {name} of a sharded model would become a DTensor: fully_shard and tensor parallelism cannot be "
                "applied on top of unwall.shard, which partitions the model already"
            )
        engine = self._engine() if isinstance(param, nn.Parameter) and id(param) not in self._places else None
        swaps = sys._getframe(1).f_globals.get("__name__") == _SWAPS
        if engine is not None and not swaps:
            engine.changed = True
        if swaps or self._swapped:
            self._note_swapped(name, param)
        super().__setitem__(name, param)

    def _note_swapped(self, name: str, param: Any) -> None:
        """Values of the dtype that the parameter was given in are computed with as the parameter would be."""
        self._swapped.pop(name, None)
        engine, own = self._engine(), cast(nn.Parameter, dict.get(self, name))
        if engine is None or not isinstance(param, torch.Tensor) or id(param) in self._places or id(own) not in self._places:
            return
        given, computes = dtypes_of(engine, own)
        if given is not computes and param.dtype is given:
            self._swapped[name] = computes

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
        engine.backward.arrivals.take_gradients_of(param)
    names = {module: name for name, module in model.named_modules()}
    for module, unit in _units(model):
        _follow_calls(engine, module, unit, casts_of(engine, module, _own(module, unit), names[module]))
        if not unit:
            _watch_lookups(engine, module)
    _cover_calls(engine, model)
    for module in new:
        _save_and_load_whole(module, state_dicts)
        module.__dict__["_apply"] = functools.partial(_convert, engine, module)
        tell_of_inserts(engine, module)
        copy_plainly(module)
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
        copy_plainly(module)


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
        before, after = (opaque(Enter), opaque(Leave)) if unit else (Enter, Leave)
        enter, leave = before(engine, groups, unseen, casts), after(engine, casts)
        first = module.register_forward_pre_hook(enter, prepend=True, with_kwargs=True)
        last = module.register_forward_hook(leave, with_kwargs=True, always_call=True)
        if not unit and is_plain_call(module):
            module.__dict__["_call_impl"] = Short(module, enter, leave, (first.id, last.id)).call


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
