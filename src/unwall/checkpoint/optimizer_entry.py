"""An optimizer in a checkpoint, apart from the tensors of its states: options, step counts, loss scale.

[Note: by name]
A checkpoint knows parameters by their names in the model, so an optimizer finds its states again whatever order its parameters
were given in; only the param groups must be the same ones.
"""

from collections.abc import Callable, Collection, Mapping
from typing import Any

from torch import nn

from unwall.checkpoint.errors import CheckpointError
from unwall.checkpoint.manifest import OptimizerEntry
from unwall.checkpoint.tree import Keep, decode, encode
from unwall.optim.adamw import AdamW
from unwall.optim.option_check import check_options
from unwall.optim.sharded import ShardedOptimizer
from unwall.optim.wrap import Wrapped, _shared
from unwall.runtime.engine import Engine


def kind_of(optimizer: ShardedOptimizer) -> str:
    return f"wrap:{type(optimizer.inner).__name__}" if isinstance(optimizer, Wrapped) else type(optimizer).__name__


def check_optimizer(optimizer: object, engine: Engine) -> ShardedOptimizer | None:
    """The optimizer itself. TypeError or ValueError for one that cannot be saved or loaded with this model, or not now."""
    if optimizer is None:
        return None
    if not isinstance(optimizer, ShardedOptimizer):
        raise TypeError(
            f"{type(optimizer).__name__} is not an optimizer of a sharded model: give the unwall.AdamW or unwall.wrap(...) "
            "that trains it, and the state_dict() of any other in extra"
        )
    if any(other is not engine for other in optimizer.engines()):
        raise ValueError(f"{type(optimizer).__name__} has parameters of another model: build one for each model")
    if isinstance(optimizer, AdamW):
        optimizer.refuse_between()
    return optimizer


def entry_of(optimizer: ShardedOptimizer, names: Mapping[int, str], keep: Keep, called: str = "optimizer") -> OptimizerEntry:
    """``names``: of the model's parameters, by their ids. ``keep`` takes tensors among the options."""
    groups = []
    for number, group in enumerate(optimizer.param_groups):
        options = {name: value for name, value in group.items() if name not in ("params", "param_names")}
        known = tuple(names[id(param)] for param in group["params"])
        groups.append((known, encode(options, f"{called}.param_groups[{number}]", keep)))
    params: dict[str, Any] = {}
    for param in optimizer._params():
        name = names[id(param)]
        if "step" not in optimizer.state.get(param, {}):
            continue
        params[name] = {"step": int(optimizer.state[param]["step"])}
        if isinstance(optimizer, Wrapped):
            past = optimizer._past[param]
            params[name]["inner"] = encode(dict(past.scalars), f"{called}.state[{name}]", keep)
            params[name]["stored"] = sorted(past.stored)
    return OptimizerEntry(kind_of(optimizer), tuple(groups), params, optimizer.scaler.state_dict())


def stored_states(optimizer: ShardedOptimizer, param: nn.Parameter) -> set[str] | None:
    """Which states of a parameter there are to save. None: all that the rule keeps; an empty set before its first step."""
    if "step" not in optimizer.state.get(param, {}):
        return set()
    return set(optimizer._past[param].stored) if isinstance(optimizer, Wrapped) else None


def check_entry(
    entry: OptimizerEntry,
    optimizer: ShardedOptimizer,
    names: Mapping[int, str],
    where: str,
    everywhere: Callable[[int], Collection[str]],
) -> None:
    """CheckpointError where what was saved is not of this optimizer. ``everywhere``: what any pipeline stage has in a param
    group."""
    if entry.kind != kind_of(optimizer):
        raise CheckpointError(f"{where} has the states of {entry.kind}, the optimizer here is {kind_of(optimizer)}")
    if len(entry.groups) != len(optimizer.param_groups):
        raise CheckpointError(
            f"{where} has {len(entry.groups)} param groups, the optimizer here {len(optimizer.param_groups)}: build it alike"
        )
    for number, ((saved, _), group) in enumerate(zip(entry.groups, optimizer.param_groups, strict=True)):
        here = {names[id(param)] for param in group["params"]}.union(everywhere(number))
        if set(saved) != here:
            other = sorted(set(saved) ^ here)[0]
            raise CheckpointError(
                f"{where}: param group {number} has other parameters than the optimizer here ({other}, for one): build it alike"
            )


def check_values(entry: OptimizerEntry, optimizer: ShardedOptimizer, names: Mapping[int, str], get: Any) -> None:
    """Raises for what ``apply_entry`` could not take, and changes nothing. An option that is not there stays as it is."""
    found = _options(entry, optimizer, names, get)
    groups = [{**own, **group} for own, group in zip(optimizer.param_groups, found["param_groups"], strict=True)]
    check_options(optimizer.param_groups, optimizer.defaults, {"state": {}, **found, "param_groups": groups})
    for name, saved in entry.params.items():
        if isinstance(optimizer, Wrapped) and not isinstance(decode(saved["inner"], get), dict):
            raise TypeError(f"what {entry.kind} keeps of {name} is no dict")


def _options(entry: OptimizerEntry, optimizer: ShardedOptimizer, names: Mapping[int, str], get: Any) -> dict[str, Any]:
    """As in a state dict of the optimizer."""
    numbers = {name: number for number, name in enumerate(names[id(param)] for param in optimizer._params())}
    groups = []
    for (_, options), group in zip(entry.groups, optimizer.param_groups, strict=True):
        members = [numbers[names[id(param)]] for param in group["params"]]
        groups.append({**decode(options, get), "params": members})
    return {"param_groups": groups, "scaler": dict(entry.scaler)}


def apply_entry(entry: OptimizerEntry, optimizer: ShardedOptimizer, names: Mapping[int, str], get: Any) -> None:
    """Options, step counts and loss scale. The tensors of the states are loaded by then."""
    optimizer._load_options(_options(entry, optimizer, names, get))
    pasts: dict[Any, Any] = {}
    for param in optimizer._params():
        saved = entry.params.get(names[id(param)])
        if saved is None:
            optimizer.state.leave_out(param)
        else:
            optimizer.state[param]["step"] = int(saved["step"])
        if isinstance(optimizer, Wrapped):
            inner = None if saved is None else decode(saved["inner"], get)
            if saved is None or inner is None:
                optimizer._past[param] = optimizer._begin[param]
            else:
                optimizer._past[param] = _shared(pasts, inner, set(saved["stored"]))
