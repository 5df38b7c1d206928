"""Ties a model's modules to the engine: hooks, watched parameter mappings, casts at the edges."""

import functools
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from unwall.runtime.engine import Engine
from unwall.runtime.outputs import cast_floats
from unwall.runtime.whole import StateDictHooks, WholeParams

# Module or parameter -> weak reference to its engine. The hooks on the modules own the engine: it goes with the model.
_engines = WeakIdKeyDictionary()


def engine_of(thing: nn.Module | nn.Parameter) -> Engine | None:
    """The engine of a sharded model, of one of its modules, or of one of its parameters."""
    found = _engines.get(thing)
    engine = found() if found is not None else None
    return engine if isinstance(engine, Engine) else None


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
        self._groups = groups
        self._reads = reads
        self._casts = casts

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any] | None:
        self.engine.forward.enter(module, self._groups, self._reads)
        return None if self._casts is None else self._casts.inputs(args, kwargs)


class Leave(Hook):
    """After a module's forward, also when it raised."""

    def __init__(self, engine: Engine, casts: "Casts | None") -> None:
        super().__init__(engine)
        self._casts = casts

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        if self._casts is not None:
            output = self._casts.outputs(output)
        self.engine.forward.leave(module, (args, kwargs), output)
        return output


# Read by dynamo: it runs these as they are instead of tracing into them. (torch.compiler.disable does the same, but imports
# all of dynamo at once.)
Enter.__call__._torchdynamo_disable = True  # type: ignore[attr-defined]
Leave.__call__._torchdynamo_disable = True  # type: ignore[attr-defined]


class Casts:
    """Dtypes at the edge of a module that computes in another one than what surrounds it."""

    def __init__(self, outside: torch.dtype, inside: torch.dtype, *, back: bool) -> None:
        self._outside = outside
        self._inside = inside
        self._back = back

    def inputs(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        return cast_floats(args, self._outside, self._inside), cast_floats(kwargs, self._outside, self._inside)

    def outputs(self, output: Any) -> Any:
        return cast_floats(output, self._inside, self._outside) if self._back else output


class Watched(dict[str, Any]):
    """A module's ``_parameters``: tells the engine when a running call looks a parameter up, so that one read outside its
    owner's forward (a tied head, a functional use) is fetched like any other."""

    def __init__(self, engine: Engine, entries: dict[str, Any]) -> None:
        super().__init__(entries)
        self._forward = engine.forward
        self._places = engine.places

    def __getitem__(self, name: str) -> Any:
        param = super().__getitem__(name)
        if param is not None and self._forward.running and id(param) in self._places:
            self._forward.touched(param)
        return param

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        refuse_copy()

    def __reduce__(self) -> NoReturn:
        refuse_pickle()

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        refuse_pickle()


def install(engine: Engine, model: nn.Module) -> None:
    """Ties a model to its engine: calls, parameters, gradients, saving and loading, conversions, buffers."""
    _remember(engine, model)
    for param in _params(engine):
        engine.backward.take_gradients_of(param)
    for module, unit in _units(model):
        _follow_calls(engine, module, unit, _casts(engine, module, unit, root=module is model))
        if not unit:
            _watch_lookups(engine, module)
    # torch's own would set .grad only, and gradients that are on their way would still come.
    model.__dict__["zero_grad"] = engine.zero_grad
    _save_and_load_whole(engine, model)
    for module in model.modules():
        module.__dict__["_apply"] = functools.partial(_convert, engine, module)
    _place_buffers(engine, model)


def _remember(engine: Engine, model: nn.Module) -> None:
    """Whose the modules and parameters are, for ``engine_of``."""
    for param in _params(engine):
        _engines[param] = weakref.ref(engine)
    for module, _ in _units(model):
        _engines[module] = weakref.ref(engine)


def _follow_calls(engine: Engine, module: nn.Module, unit: bool, casts: Casts | None) -> None:
    """Hooks before and after a module's forward."""
    own = _own(module, unit)
    groups = tuple(dict.fromkeys(place.group for param in own for place in engine.places[id(param)]))
    unseen = own if unit or isinstance(module, nn.RNNBase) else ()
    module.register_forward_pre_hook(Enter(engine, groups, unseen, casts), prepend=True, with_kwargs=True)
    module.register_forward_hook(Leave(engine, casts), with_kwargs=True, always_call=True)


def _casts(engine: Engine, module: nn.Module, unit: bool, root: bool) -> Casts | None:
    """What happens to dtypes at a module's edge."""
    compute, own = engine.plan.compute_dtype, _own(module, unit)
    if compute is torch.float32 or not (own or root):
        return None
    if own and all(_kept_fp32(engine, param) for param in own):
        return Casts(compute, torch.float32, back=True)
    return Casts(torch.float32, compute, back=False)


def _watch_lookups(engine: Engine, module: nn.Module) -> None:
    """A parameter that is read by another module's forward counts as a use by the running call."""
    if _own(module):
        module.__dict__["_parameters"] = Watched(engine, module._parameters)


def _save_and_load_whole(engine: Engine, model: nn.Module) -> None:
    """``state_dict`` and ``load_state_dict`` work with whole tensors."""
    reader = WholeParams(engine)
    for module in model.modules():
        if module is model or any(param is not None for param in module._parameters.values()):
            hooks = StateDictHooks(engine, reader)
            module.register_state_dict_post_hook(functools.partial(hooks.saved))  # torch sets an attribute on it
            module.register_load_state_dict_pre_hook(hooks.before_load)
            module.register_load_state_dict_post_hook(hooks.after_load)


def _place_buffers(engine: Engine, model: nn.Module) -> None:
    """Buffers are whole, on the device. All ranks start from rank 0's."""
    for owner in model.modules():
        for name, buffer in owner._buffers.items():
            if buffer is None or buffer.is_meta:
                continue
            if buffer.device != engine.device.device:
                buffer = owner._buffers[name] = buffer.to(engine.device.device)
            if engine.ranks.size > 1 and buffer.numel():
                values = buffer.detach().contiguous().reshape(-1)
                engine.ranks.broadcast(values.view(torch.uint8))
                buffer.copy_(values.view(buffer.shape))


def _convert(
    engine: Engine, module: nn.Module, change: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True
) -> nn.Module:
    """What ``model.to(...)``, ``.half()`` and the like do on a sharded model: nothing for the parameters when nothing would
    change (``model.to(device)`` after ``shard``), an error otherwise; buffers follow."""
    for param in module.parameters(recurse=recurse):
        if id(param) not in engine.places:
            continue
        probe = torch.empty((1, 2, 2, 2), dtype=param.dtype, device=engine.device.device)
        changed = change(probe)
        if (changed.dtype, changed.device, changed.stride()) != (probe.dtype, probe.device, probe.stride()):
            raise RuntimeError(
                "a sharded model's parameters cannot be converted or moved: convert the model before unwall.shard, or choose "
                "Plan(compute_dtype=...)"
            )
    for owner in module.modules() if recurse else (module,):
        for name, buffer in owner._buffers.items():
            if buffer is not None:
                owner._buffers[name] = change(buffer)
    return module


def _kept_fp32(engine: Engine, param: nn.Parameter) -> bool:
    return all(engine.groups[place.group].layout.dtype is torch.float32 for place in engine.places[id(param)])


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
