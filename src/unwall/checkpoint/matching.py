"""Which tensor of a checkpoint belongs to which parameter, state and buffer of a model. Changes nothing."""

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial

import torch

from unwall.checkpoint.errors import CheckpointError
from unwall.checkpoint.expanded import check_expanded
from unwall.checkpoint.manifest import Manifest, OptimizerEntry, Tensor
from unwall.checkpoint.names import Names
from unwall.checkpoint.optimizer_entry import check_entry
from unwall.checkpoint.stages import Stages
from unwall.checkpoint.trained import Trained, of_optimizer
from unwall.optim.seen_states import seen_specs
from unwall.optim.sharded import ShardedOptimizer
from unwall.runtime.engine import Engine


@dataclass
class Matched:
    """What is to be loaded into a model."""

    params: dict[int, Tensor] = field(default_factory=dict)
    """By the parameter's id."""
    states: dict[tuple[int, str, str], Tensor] = field(default_factory=dict)
    """By the parameter's id, the optimizer's name and the state's."""
    buffers: dict[str, Tensor] = field(default_factory=dict)
    values: dict[str, Tensor] = field(default_factory=dict)
    twins: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    """Two tensors of the checkpoint that are one parameter here, tied since: their values must be the same."""

    @property
    def tensors(self) -> list[Tensor]:
        return [*self.params.values(), *self.states.values(), *self.buffers.values(), *self.values.values()]


def match(manifest: Manifest, engine: Engine, names: Names, optimizers: Trained, stages: Stages, where: str) -> Matched:
    """CheckpointError, naming the tensor, where the checkpoint is not of this model and these optimizers."""
    found = Matched()
    own = _own(manifest, engine.everyone.rank, engine.everyone.size)
    known = {name: tensor for tensor in manifest.of_kind("param") for name in (tensor.name, *tensor.aliases)}
    here = {name: (name, *names.aliases.get(name, ())) for name in names.params}
    mine = {alias for all_names in here.values() for alias in all_names}
    _check_names("parameters", mine | stages.params, known, here.values(), where)
    for name, param in names.params.items():
        tensor, *others = {id(known[alias]): known[alias] for alias in here[name] if alias in known}.values()
        found.twins += [(tensor, other) for other in others]
        dtype, shape = param.dtype, tuple(param.shape)
        if id(param) in engine.places:
            dtype = engine.groups[engine.places[id(param)][0].group].layout.dtype
        _check(tensor, name, shape, torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype, where)
        found.params[id(param)] = tensor
    buffers = {tensor.name: tensor for tensor in own if tensor.kind == "buffer"}
    _check_names("buffers", stages.buffers.union(names.buffers), buffers, [(name,) for name in names.buffers], where)
    for name, buffer in names.buffers.items():
        _check(buffers[name], name, tuple(buffer.shape), buffer.dtype, where, by_value=True)
    found.buffers = {name: buffers[name] for name in names.buffers}
    found.values = {tensor.name: tensor for tensor in own if tensor.kind == "value"}
    saved = manifest.optimizers
    if optimizers and saved.keys() != optimizers.keys():
        raise CheckpointError(_other_optimizers(saved, optimizers, where))
    for called, optimizer in optimizers.items():
        whose = f"{where}{of_optimizer(called)}"
        check_entry(saved[called], optimizer, names.of, whose, partial(_group, stages, called))
        states = {(tensor.name, tensor.state): tensor for tensor in manifest.of_kind("state") if tensor.optimizer == called}
        for (param_id, state), tensor in _match_states(saved[called], states, optimizer, names, whose):
            found.states[param_id, called, state] = tensor
    return found


def _group(stages: Stages, called: str, number: int) -> Collection[str]:
    return stages.groups.get((called, number), ())


def _other_optimizers(saved: Collection[str], given: Collection[str], where: str) -> str:
    """What is said where a checkpoint has others than were given."""
    if not saved:
        return f"{where} has no optimizer in it: it was saved without one; load it without, too"
    there, here = (" and ".join(map(repr, names)) if "" not in names else "one, without a name" for names in (saved, given))
    return (
        f"{where} has these optimizers in it: {there}; given: {here}. Give as many as were saved, a list in the same order or "
        "a dict with the same names, or none to load the weights alone"
    )


def _match_states(
    entry: OptimizerEntry,
    states: Mapping[tuple[str, str | None], Tensor],
    optimizer: ShardedOptimizer,
    names: Names,
    where: str,
) -> Iterator[tuple[tuple[int, str], Tensor]]:
    for param in optimizer._params():
        name = names.of[id(param)]
        saved = entry.params.get(name)
        if saved is None:
            continue
        group = optimizer.places(param)[0][1]
        dtypes = {spec.name: spec.dtype for spec in seen_specs(optimizer.rule, group)}
        for state in saved.get("stored", list(dtypes)):
            tensor = states.get((name, state))
            if tensor is None:
                raise CheckpointError(f"{where} has no {state} of {name}, which {entry.kind} keeps")
            _check(tensor, f"{state} of {name}", tuple(param.shape), dtypes.get(state, tensor.dtype), where)
            yield (id(param), state), tensor


def _own(manifest: Manifest, rank: int, size: int) -> list[Tensor]:
    """What is this rank's: its own where it wrote one and the number of ranks is the same, otherwise everyone's."""
    found: dict[tuple[str, str], Tensor] = {}
    for tensor in manifest.tensors:
        if tensor.kind not in ("buffer", "value"):
            continue
        key = (tensor.kind, tensor.name)
        if tensor.rank is None:
            found.setdefault(key, tensor)
        elif manifest.world_size == size and tensor.rank == rank:
            found[key] = tensor
    return list(found.values())


def _check_names(
    what: str, here: Collection[str], saved: Mapping[str, Tensor], wanted: Iterable[tuple[str, ...]], where: str
) -> None:
    missing = sorted(names[0] for names in wanted if not any(name in saved for name in names))
    unexpected = sorted({tensor.name for tensor in saved.values() if not {tensor.name, *tensor.aliases}.intersection(here)})
    if missing or unexpected:
        parts = [
            f"{len(listed)} {how}: {', '.join(listed[:5])}{' ...' if len(listed) > 5 else ''}"
            for how, listed in (("missing in it", missing), ("not in the model", unexpected))
            if listed
        ]
        raise CheckpointError(f"{where} is of another model: of the {what}, {'; '.join(parts)}")


def check_value(tensor: Tensor, value: torch.Tensor, buffer: torch.Tensor, where: str) -> None:
    """CheckpointError where what was read does not go into a buffer: it has fewer places in memory, or a narrower dtype."""
    dtype = buffer.dtype
    try:
        check_expanded(buffer, value, tensor.name)
    except ValueError as error:
        raise CheckpointError(f"{where}: {error}") from error
    if tensor.dtype == dtype or _widens(tensor.dtype, dtype):
        return
    wide = value.double()
    if not bool(((value.to(dtype).double() == wide) | wide.isnan()).all()):
        raise CheckpointError(_other_dtype(tensor, tensor.name, dtype, where))


def _other_dtype(tensor: Tensor, name: str, dtype: torch.dtype, where: str) -> str:
    return f"{where}: {name} is {tensor.dtype} in it, which does not go into {dtype} of the model"


def _check(
    tensor: Tensor, name: str, shape: tuple[int, ...], dtype: torch.dtype, where: str, *, by_value: bool = False
) -> None:
    """``by_value``: other floats are judged when they are read, by ``check_value``."""
    if tensor.shape != shape:
        raise CheckpointError(
            f"{where}: {name} has the shape {tensor.shape} in it, in the model {shape}: it is of another model"
        )
    judged_later = by_value and tensor.dtype.is_floating_point and dtype.is_floating_point
    if tensor.dtype != dtype and not judged_later and not _widens(tensor.dtype, dtype):
        raise CheckpointError(_other_dtype(tensor, name, dtype, where))


def _widens(saved: torch.dtype, here: torch.dtype) -> bool:
    """Whether every value of one dtype is one of the other: not so with the two of 16 bits."""
    if not (saved.is_floating_point and here.is_floating_point):
        return False
    narrow, wide = torch.finfo(saved), torch.finfo(here)
    return narrow.max <= wide.max and narrow.eps >= wide.eps
